'use strict';
// Asks status.json once a second and shows it. Rates, quantiles and plots come from differences between answers, of
// which two minutes are kept here; the server keeps nothing for this page.

const PERIOD_MS = 1000;
const TIMEOUT_MS = 4000;
const HISTORY_S = 120;
const RATE_S = 5;
const SHORTEST_PLOT_S = 20;

let heard = [];  // answers, oldest first
let lastHeard = null;  // Date of the last answer
let firstAsked = new Date();

// ---- words for numbers ----

const plain = new Intl.NumberFormat('en', { maximumFractionDigits: 0 });
const count = (n) => (n >= 1e7 ? scaled(n, 1000, ['', ' k', ' M', ' G', ' T']) : plain.format(n));
const brief = (n) => (n >= 1e4 ? scaled(n, 1000, ['', ' k', ' M', ' G', ' T']) : plain.format(n));
const bytes = (n) => scaled(n, 1024, [' B', ' KiB', ' MiB', ' GiB', ' TiB']);

function scaled(n, base, units) {
  let unit = 0;
  while (n >= base * 0.99995 && unit < units.length - 1) {
    n /= base;
    unit += 1;
  }
  return (unit === 0 ? plain.format(n) : digits(n)) + units[unit];
}

// Three digits or more.
function digits(n) {
  if (n === 0) return '0';
  return n >= 100 ? plain.format(n) : n >= 10 ? n.toFixed(1) : n.toFixed(2);
}

function seconds(s) {
  if (s === null) return '–';
  if (s < 1e-3) return digits(s * 1e6) + ' µs';
  return s < 1 ? digits(s * 1e3) + ' ms' : digits(s) + ' s';
}

function age(s) {
  const parts = [[86400, 'd'], [3600, 'h'], [60, 'min'], [1, 's']];
  const first = parts.findIndex(([size]) => s >= size);
  if (first === -1) return '0 s';
  const [size, word] = parts[first];
  let text = Math.floor(s / size) + ' ' + word;
  if (first < 3) text += ' ' + Math.floor((s % size) / parts[first + 1][0]) + ' ' + parts[first + 1][1];
  return text;
}

// ---- what was heard ----

// The newest answer that is at least `span` seconds older than the last one, or the oldest; 0: null, for "since start".
function before(span) {
  if (span === 0) return null;
  const now = heard[heard.length - 1].time_seconds;
  for (let i = heard.length - 2; i > 0; i -= 1) {
    if (now - heard[i].time_seconds >= span - 0.05) return heard[i];
  }
  return heard[0];
}

// Growth per second of a counter over the last `span` seconds; null while there is one answer alone.
function rate(counter, span) {
  const last = heard[heard.length - 1];
  const first = before(span);
  const passed = last.time_seconds - first.time_seconds;
  return passed > 0 ? (counter(last) - counter(first)) / passed : null;
}

const perSecond = (value) => (value === null ? '–' : value >= 100 ? count(value) : digits(value));

// Growth per second between each two answers, as [time, value].
function rates(counter) {
  const points = [];
  for (let i = 1; i < heard.length; i += 1) {
    const passed = heard[i].time_seconds - heard[i - 1].time_seconds;
    if (passed > 0) points.push([heard[i].time_seconds, (counter(heard[i]) - counter(heard[i - 1])) / passed]);
  }
  return points;
}

const values = (gauge) => heard.map((answer) => [answer.time_seconds, gauge(answer)]);

const sum = (object) => Object.values(object).reduce((a, b) => a + b, 0);

// ---- quantiles ----

// counts: cumulative, one more than bounds. A straight line inside a bucket, as Prometheus has it.
function quantile(q, bounds, counts) {
  const total = counts[counts.length - 1];
  if (total <= 0) return null;
  const rank = q * total;
  const i = counts.findIndex((n) => n >= rank);
  if (i >= bounds.length) return Infinity;
  const low = i > 0 ? bounds[i - 1] : 0;
  const below = i > 0 ? counts[i - 1] : 0;
  return low + ((bounds[i] - low) * (rank - below)) / Math.max(counts[i] - below, 1e-9);
}

function bucketsOf(answer, phase, part) { return answer.phases[phase][part].buckets; }

function quantileRow(phase, part, first) {
  const last = heard[heard.length - 1];
  const bounds = last.bucket_bounds_seconds;
  let counts = bucketsOf(last, phase, part);
  if (first) {
    const old = bucketsOf(first, phase, part);
    counts = counts.map((n, i) => n - old[i]);
  }
  const cells = [0.5, 0.95, 0.99].map((q) => {
    const value = quantile(q, bounds, counts);
    return value === Infinity ? '> ' + seconds(bounds[bounds.length - 1]) : seconds(value);
  });
  return [...cells, brief(counts[counts.length - 1])];
}

// ---- drawing ----

const places = new Map([...document.querySelectorAll('[data-v]')].map((place) => [place.dataset.v, place]));

function show(name, text) {
  const place = places.get(name);
  if (place.textContent !== text) place.textContent = text;
}

function svgElement(name, attributes) {
  const element = document.createElementNS('http://www.w3.org/2000/svg', name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function spark(name, points, smallestTop) {
  const svg = document.querySelector(`[data-spark="${name}"]`);
  svg.setAttribute('viewBox', '0 0 100 30');
  svg.setAttribute('preserveAspectRatio', 'none');
  if (points.length < 2) {
    svg.replaceChildren();
    return;
  }
  // A young plot is drawn wider than its share of two minutes.
  const now = points[points.length - 1][0];
  const span = Math.max(SHORTEST_PLOT_S, now - points[0][0]);
  const top = Math.max(smallestTop, ...points.map(([, value]) => value));
  const line = points.map(([time, value]) =>
    `${(100 - (100 * (now - time)) / span).toFixed(2)},${(29 - (28 * value) / top).toFixed(2)}`);
  const start = line[0].split(',')[0];
  svg.replaceChildren(svgElement('path', { d: `M${start},30L${line.join('L')}L100,30Z` }),
    svgElement('polyline', { points: line.join(' ') }));
}

// rows: [[class, heading, cell...]]
function fillTable(id, rows) {
  const body = document.getElementById(id);
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach(([kind, heading, ...cells], i) => {
    let row = body.rows[i];
    if (!row) {
      row = body.insertRow();
      const head = document.createElement('th');
      head.scope = 'row';
      row.append(head, ...cells.map(() => document.createElement('td')));
    }
    row.className = kind;
    [heading, ...cells].forEach((text, column) => {
      if (row.cells[column].textContent !== text) row.cells[column].textContent = text;
    });
  });
}

function showLatency() {
  if (heard.length === 0) return;
  const span = Number(document.querySelector('input[name="window"]:checked').value);
  const first = before(span);
  const rows = [];
  for (const phase of ['prefill', 'decode']) {
    rows.push(['', phase, ...quantileRow(phase, 'step', first)]);
    rows.push(['minor', 'queue', ...quantileRow(phase, 'queue', first)]);
    rows.push(['minor', 'compute', ...quantileRow(phase, 'compute', first)]);
  }
  fillTable('quantiles', rows);
}

function showFailures(now) {
  const old = before(60);
  const rows = [];
  const add = (words, pick) => {
    for (const [name, total] of Object.entries(pick(now))) {
      if (total > 0 && name !== 'OK') rows.push([words(name), total - pick(old)[name], total]);
    }
  };
  add((reason) => `refused: ${reason}`, (answer) => answer.requests.rejected);
  add((code) => `ended ${code}`, (answer) => answer.requests.handled);
  add((stage) => `client gone: ${stage}`, (answer) => answer.requests.cancelled);
  const failed = (answer) => Object.entries(answer.snapshots).map(([op, { failures }]) => [op, failures]);
  add((op) => `${op} failed`, (answer) => Object.fromEntries(failed(answer)));
  add((reason) => `session ${reason}`, ({ sessions: { closed: { evicted, lost } } }) => ({ evicted, lost }));
  add((name) => name, (answer) => ({ 'connections refused': answer.requests.connections_refused }));
  rows.sort((a, b) => b[1] - a[1] || b[2] - a[2]);
  fillTable('failures', rows.map(([words, recent, total]) => ['', words, count(recent), count(total)]));
  places.get('errors.note').hidden = rows.length > 0;
}

function showCache(cache) {
  const percent = (n) => (cache.capacity_bytes > 0 ? (100 * n) / cache.capacity_bytes : 0);
  const share = percent(cache.used_bytes).toFixed(1) + ' %';
  for (const part of ['used', 'reserved', 'shared']) {
    document.querySelector(`#bar .${part}`).style.width = Math.min(100, percent(cache[part + '_bytes'])) + '%';
  }
  document.getElementById('bar').setAttribute('aria-label',
    `${share} of the cache is used, ${percent(cache.reserved_bytes).toFixed(1)} % reserved`);
  show('cache.percent', share);
  show('cache.used', bytes(cache.used_bytes));
  show('cache.used_exact', bytes(cache.used_bytes));
  for (const part of ['capacity', 'reserved', 'shared', 'spilled']) show('cache.' + part, bytes(cache[part + '_bytes']));
  show('cache.free', bytes(cache.capacity_bytes - cache.reserved_bytes));
  show('cache.tokens', count(cache.tokens));
  const read = rate((answer) => answer.cache.read_bytes, RATE_S);
  show('cache.read_rate', read === null ? '–' : digits(read / 1e9) + ' GB/s');
}

const ofLimit = (value, limit, words) => words(value) + (limit > 0 ? ' of ' + words(limit) : '');

function showLoad(now) {
  show('sessions.active', count(now.sessions.active));
  show('sessions.limit', count(now.sessions.limit));
  show('sessions.created', count(sum(now.sessions.created)));
  show('sessions.closed', count(now.sessions.closed.closed));
  show('sessions.expired', count(now.sessions.closed.expired));
  show('sessions.dropped', count(now.sessions.evictions.dropped));
  show('sessions.spilled', count(now.sessions.spilled));
  show('sessions.moved', `${count(now.snapshots.spill.count)} / ${count(now.snapshots.restore.count)}`);
  spark('sessions', values((answer) => answer.sessions.active), 1);
  for (const phase of ['prefill', 'decode']) {
    const tokens = (answer) => answer.phases[phase].tokens;
    show(phase + '.rate', perSecond(rate(tokens, RATE_S)));
    show(phase + '.tokens', count(tokens(now)));
    spark(phase, rates(tokens), 1);
  }
  const { queue, requests } = now;
  show('queue.depth', count(queue.depth));
  show('queue.limit', count(queue.limit));
  show('queue.tokens', ofLimit(queue.tokens, queue.tokens_limit, count) + ' tokens wait');
  spark('queue', values((answer) => answer.queue.depth), 1);
  show('requests.in_flight', count(requests.in_flight));
  show('requests.bytes', ofLimit(requests.in_flight_bytes, requests.in_flight_bytes_limit, bytes));
  show('requests.streams', ofLimit(requests.streams, requests.streams_limit, count));
  show('requests.ok', count(requests.handled.OK));
  show('requests.rate', perSecond(rate((answer) => sum(answer.requests.handled), RATE_S)));
}

function showProcess(now) {
  const { build, process } = now;
  show('build', `version ${build.version}, oneDNN ${build.onednn}, ${build.compute_threads} compute threads,`);
  show('build.isa', build.isa);
  show('uptime', age(now.uptime_seconds));
  const cpu = rate((answer) => answer.process.cpu_seconds, RATE_S);
  show('process.cpu', cpu === null ? '–' : cpu.toFixed(2) + ' cores');
  show('process.rss', ofLimit(process.resident_bytes, process.memory_limit_bytes, bytes));
  show('process.threads', count(process.threads));
  show('process.fds', ofLimit(process.open_fds, process.max_fds, count));
}

function showBadge(text, kind) {
  const badge = document.getElementById('badge');
  if (badge.textContent !== text) badge.textContent = text;
  badge.className = 'badge ' + kind;
  document.title = `attnd: ${text}`;
}

function showAll(now) {
  showLoad(now);
  showCache(now.cache);
  showLatency();
  showFailures(now);
  showProcess(now);
  if (now.draining) showBadge('draining', 'warn');
  else if (now.ready) showBadge('ready', 'good');
  else showBadge('not ready', 'warn');
}

function showSilence() {
  const since = lastHeard || firstAsked;
  const silent = Math.round((new Date() - since) / 1000);
  const alert = document.getElementById('alert');
  alert.textContent = `No answer since ${since.toLocaleTimeString()} (${age(silent)})` +
    (lastHeard ? '. What stands below was true then.' : '.');
  alert.hidden = false;
  document.body.classList.add('stale');
  showBadge('no answer', 'bad');
}

// ---- asking ----

function remember(answer) {
  const last = heard[heard.length - 1];
  // Another process: its counters start anew.
  if (last && last.start_time_seconds !== answer.start_time_seconds) heard = [];
  heard.push(answer);
  heard = heard.filter((old) => answer.time_seconds - old.time_seconds <= HISTORY_S);
}

async function ask() {
  const abort = new AbortController();
  const timer = setTimeout(() => abort.abort(), TIMEOUT_MS);
  try {
    const reply = await fetch('status.json', { cache: 'no-store', signal: abort.signal });
    if (!reply.ok) throw new Error(reply.statusText);
    remember(await reply.json());
  } catch (error) {
    showSilence();
    return;
  } finally {
    clearTimeout(timer);
  }
  lastHeard = new Date();
  document.getElementById('alert').hidden = true;
  document.body.classList.remove('stale');
  showAll(heard[heard.length - 1]);
}

async function askForever() {
  for (;;) {
    const next = Date.now() + PERIOD_MS;
    await ask();
    await new Promise((wake) => setTimeout(wake, Math.max(100, next - Date.now())));
  }
}

for (const choice of document.querySelectorAll('input[name="window"]')) choice.addEventListener('change', showLatency);
askForever();
