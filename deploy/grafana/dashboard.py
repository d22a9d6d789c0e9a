#!/usr/bin/env python3
"""Makes dashboards/attnd.json of panels.py with Grafana's Foundation SDK. usage: dashboard.py [--check]

--check writes nothing and fails when the file is not what would be written. deploy/python_env installs the SDK.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as prometheus_models

sys.path.insert(0, str(Path(__file__).resolve().parent))
from panels import ROWS, Panel, Query  # noqa: E402

OUTPUT = Path(__file__).resolve().parent / "dashboards/attnd.json"
# The uid of provisioning/datasources/prometheus.yml.
DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="attnd-prometheus")
HEIGHTS = {"stat": 4, "timeseries": 8, "heatmap": 8}


def expand(expr: str) -> str:
    return expr.replace("$I", 'instance=~"$instance"').replace("$R", "$__rate_interval")


def target(query: Query, number: int) -> prometheus.Dataquery:
    built = prometheus.Dataquery().ref_id(chr(ord("A") + number)).expr(expand(query.expr)).legend_format(query.legend)
    if query.heatmap:
        built.format(prometheus_models.PromQueryFormat.HEATMAP)
    return built.datasource(DATASOURCE)


def thresholds(yellow: float, red: float) -> dashboards.ThresholdsConfig:
    steps = [models.Threshold(value=None, color="green"), models.Threshold(value=yellow, color="yellow"),
             models.Threshold(value=red, color="red")]
    return dashboards.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def mapping(panel: Panel) -> models.ValueMap:
    options = {value: models.ValueMappingResult(text=text, color=color, index=index)
               for index, (value, text, color) in enumerate(panel.mappings)}
    return models.ValueMap(options=options)


def stat_panel(panel: Panel) -> stat.Panel:
    built = stat.Panel().reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    built.graph_mode(common_models.BigValueGraphMode.NONE if panel.mappings or panel.show_name
                     else common_models.BigValueGraphMode.AREA)
    if panel.show_name:
        built.text_mode(common_models.BigValueTextMode.NAME)
    if panel.mappings:
        built.mappings([mapping(panel)])
    if panel.thresholds:
        built.thresholds(thresholds(*panel.thresholds))
    return built


def timeseries_panel(panel: Panel) -> timeseries.Panel:
    legend = common.VizLegendOptions().show_legend(True).placement(common_models.LegendPlacement.BOTTOM)
    legend.display_mode(common_models.LegendDisplayMode.LIST)
    tooltip = common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI)
    tooltip.sort(common_models.SortOrder.DESCENDING)
    built = timeseries.Panel().legend(legend).tooltip(tooltip).min(0).line_width(1).fill_opacity(10)
    built.show_points(common_models.VisibilityMode.NEVER)
    if panel.stacked:
        built.fill_opacity(40).stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    return built


def heatmap_panel(panel: Panel) -> heatmap.Panel:
    axis = heatmap.YAxisConfig().unit(panel.unit)
    color = heatmap.HeatmapColorOptions().mode(heatmap_models.HeatmapColorMode.SCHEME).scheme("Spectral").steps(64)
    scale = common.ScaleDistributionConfig().type(common_models.ScaleDistribution.LINEAR)
    return heatmap.Panel().calculate(False).y_axis(axis).color(color).scale_distribution(scale).show_legend()


def build_panel(panel: Panel, number: int, x: int, y: int) -> stat.Panel | timeseries.Panel | heatmap.Panel:
    make = {"stat": stat_panel, "timeseries": timeseries_panel, "heatmap": heatmap_panel}[panel.kind]
    built = make(panel).title(panel.title).description(panel.description).unit(panel.unit).datasource(DATASOURCE)
    built.id(number).grid_pos(models.GridPos(x=x, y=y, w=panel.width, h=HEIGHTS[panel.kind]))
    for position, query in enumerate(panel.queries):
        built.with_target(target(query, position))
    return built


def instance_variable() -> dashboards.QueryVariable:
    variable = dashboards.QueryVariable("instance").label("Instance").datasource(DATASOURCE)
    variable.query('label_values(up{job="attnd"}, instance)').refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    variable.multi(True).include_all(True).all_value(".*").sort(models.VariableSort.ALPHABETICAL_ASC)
    return variable.current(models.VariableOption(selected=True, text="All", value="$__all"))


def build() -> models.Dashboard:
    dashboard = dashboards.Dashboard("attnd").uid("attnd").tags(["attnd"]).refresh("5s").time("now-15m", "now")
    dashboard.description("Sessions, cache and attention of attnd. deploy/README.md explains its alerts.")
    dashboard.tooltip(models.DashboardCursorSync.CROSSHAIR).readonly().with_variable(instance_variable())
    y, numbers = 0, itertools.count(1)
    for title, panels in ROWS:
        dashboard.with_row(dashboards.Row(title).id(next(numbers)).grid_pos(models.GridPos(x=0, y=y, w=24, h=1)))
        x, y, height = 0, y + 1, 0
        for panel in panels:
            if x + panel.width > 24:
                x, y = 0, y + height
            dashboard.with_panel(build_panel(panel, next(numbers), x, y))
            x, height = x + panel.width, HEIGHTS[panel.kind]
        y += height
    return dashboard.build()


def text() -> str:
    return json.dumps(build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        if OUTPUT.read_text() == text():
            return 0
        print(f"{OUTPUT} is not what {Path(__file__).name} makes of panels.py: run it", file=sys.stderr)
        return 1
    if sys.argv[1:]:
        print(__doc__, file=sys.stderr)
        return 2
    OUTPUT.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
