"""ggml: a graph of one FLASH_ATTN_EXT node, through the C interface of its shared libraries (argument: their place)."""

import ctypes
import glob
import os
import sys
import typing

import numpy as np

import protocol
import side

TYPES = {"f32": 0, "f16": 1, "bf16": 30}  # enum ggml_type
MADV_HUGEPAGE = 14


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class _ThreadpoolParams(ctypes.Structure):
    _fields_ = [
        ("cpumask", ctypes.c_bool * 512),
        ("n_threads", ctypes.c_int),
        ("prio", ctypes.c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    ]


class _Library:
    """The functions that are used, with their types, from whichever of the libraries has them."""

    def __init__(self, folder: str):
        pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        self._parts = [
            ctypes.CDLL(self._path(folder, name), mode=ctypes.RTLD_GLOBAL) for name in ("ggml-base", "ggml-cpu")
        ]
        self._declare("ggml_version", ctypes.c_char_p)
        self._declare("ggml_init", pointer, _InitParams)
        self._declare("ggml_free", None, pointer)
        self._declare("ggml_new_tensor_4d", pointer, pointer, integer, *[ctypes.c_int64] * 4)
        self._declare("ggml_get_data", pointer, pointer)
        self._declare("ggml_flash_attn_ext", pointer, *[pointer] * 5, *[ctypes.c_float] * 3)
        self._declare("ggml_new_graph_custom", pointer, pointer, size, ctypes.c_bool)
        self._declare("ggml_build_forward_expand", None, pointer, pointer)
        self._declare("ggml_backend_cpu_init", pointer)
        self._declare("ggml_backend_cpu_set_n_threads", None, pointer, integer)
        self._declare("ggml_backend_cpu_set_threadpool", None, pointer, pointer)
        self._declare("ggml_threadpool_params_default", _ThreadpoolParams, integer)
        self._declare("ggml_threadpool_new", pointer, ctypes.POINTER(_ThreadpoolParams))
        self._declare("ggml_threadpool_free", None, pointer)
        self._declare("ggml_backend_alloc_ctx_tensors", pointer, pointer, pointer)
        self._declare("ggml_backend_buffer_get_base", pointer, pointer)
        self._declare("ggml_backend_buffer_get_size", size, pointer)
        self._declare("ggml_backend_buffer_free", None, pointer)
        self._declare("ggml_backend_graph_compute", integer, pointer, pointer)

    @staticmethod
    def _path(folder: str, name: str) -> str:
        paths = sorted(glob.glob(os.path.join(folder, "**", f"lib{name}.so"), recursive=True))
        if not paths:
            raise protocol.Skipped(f"no lib{name}.so under the folder of --ggml")
        return paths[0]

    def _declare(self, name: str, result: typing.Any, *arguments: typing.Any) -> None:
        for part in self._parts:
            function = getattr(part, name, None)
            if function is not None:
                function.restype, function.argtypes = result, list(arguments)
                setattr(self, name.removeprefix("ggml_"), function)
                return
        raise protocol.Skipped(f"its libraries have no {name}")


class FlashAttnExt(side.Peer):
    """Tensors are described from the innermost dimension outwards: K is [head_dim, tokens, kv_heads, batch]."""

    def __init__(self, folder: str):
        self._folder = folder
        self._context = self._buffer = self._pool = None

    def version(self) -> str:
        if not self._folder:
            raise protocol.Skipped("no shared libraries of ggml found: see --ggml in README.md")
        self.ggml = _Library(self._folder)
        self._backend = self.ggml.backend_cpu_init()
        return (self.ggml.version() or b"?").decode()

    def _free(self) -> None:
        if self._buffer is not None:
            self.ggml.backend_buffer_free(self._buffer)
        if self._context is not None:
            self.ggml.free(self._context)
        self._context = self._buffer = None

    def prepare(self, case: protocol.Case, data: side.Data) -> None:
        self._free()
        self.case = case
        # Two-byte caches: f16 is its usual one, bf16 is attnd's and torch's.
        self._dtypes = ["f32"] if case.dtype == "f32" else ["f16", "bf16"]
        self._context = self.ggml.init(_InitParams(1 << 28, None, True))
        writes: list[tuple[int, np.ndarray]] = []
        self._graphs: dict[str, list[tuple[int, int]]] = {}
        for dtype in self._dtypes:
            self._build(dtype, data, writes)
        self._buffer = self.ggml.backend_alloc_ctx_tensors(self._context, self._backend)
        if not self._buffer:
            raise MemoryError("ggml_backend_alloc_ctx_tensors")
        base, size = self.ggml.backend_buffer_get_base(self._buffer), self.ggml.backend_buffer_get_size(self._buffer)
        page = os.sysconf("SC_PAGESIZE")
        ctypes.CDLL(None).madvise(ctypes.c_void_p(-(-base // page) * page), ctypes.c_size_t(size - page), MADV_HUGEPAGE)
        for tensor, array in writes:
            ctypes.memmove(self.ggml.get_data(tensor), array.ctypes.data, array.nbytes)

    def _build(self, dtype: str, data: side.Data, writes: list[tuple[int, np.ndarray]]) -> None:
        """Graphs of all layers, in every form, and what is to be written into their tensors once they have memory."""
        c = self.case

        def tensor(kind: str, array: np.ndarray) -> int:
            made = self.ggml.new_tensor_4d(self._context, TYPES[kind], *reversed(array.shape))
            writes.append((made, array))
            return made

        def by_head(x: np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(x.transpose(0, 2, 1, 3))

        q = by_head(data.q)
        k, v = (side.CONVERT[dtype](by_head(x)) for x in (data.k, data.v))
        forms = {dtype: (tensor("f32", q), None)}
        if c.queries > 1:
            hidden = np.triu(np.ones((c.queries, c.tokens), bool), k=1 + c.tokens - c.queries)
            mask = np.where(hidden, -np.inf, 0).astype(np.float16).reshape(1, 1, c.queries, c.tokens)
            forms = {dtype: (forms[dtype][0], tensor("f16", mask))}
        elif c.group > 1:
            # The query heads of a kv head as rows of one head: they are computed next to each other.
            forms[f"{dtype}-rows"] = (tensor("f32", q.reshape(c.batch, c.kv_heads, c.group, c.head_dim)), None)
        for _ in range(c.layers):
            k_tensor, v_tensor = tensor(dtype, k), tensor(dtype, v)
            for form, (q_tensor, mask_tensor) in forms.items():
                self._graphs.setdefault(form, []).append(self._graph(q_tensor, k_tensor, v_tensor, mask_tensor))

    def _graph(self, q: int, k: int, v: int, mask: int | None) -> tuple[int, int]:
        out = self.ggml.flash_attn_ext(self._context, q, k, v, mask, self.case.head_dim**-0.5, 0.0, 0.0)
        graph = self.ggml.new_graph_custom(self._context, 16, False)
        self.ggml.build_forward_expand(graph, out)
        return graph, out

    def forms(self, threads: int) -> dict[str, side.Call]:
        old = self._pool
        self._pool = self.ggml.threadpool_new(ctypes.byref(self.ggml.threadpool_params_default(threads)))
        self.ggml.backend_cpu_set_n_threads(self._backend, threads)
        self.ggml.backend_cpu_set_threadpool(self._backend, self._pool)
        if old is not None:
            self.ggml.threadpool_free(old)

        def form(graphs: list[tuple[int, int]]) -> side.Call:
            def call(layer: int) -> int:
                graph, out = graphs[layer]
                if self.ggml.backend_graph_compute(self._backend, graph) != 0:
                    raise RuntimeError("ggml_backend_graph_compute failed")
                return out

            return call

        return {name: form(graphs) for name, graphs in self._graphs.items()}

    def result(self, form: str, value: typing.Any) -> np.ndarray:
        """A node's result is [head_dim, heads, rows, batch]."""
        c = self.case
        count = c.batch * c.queries * c.q_heads * c.head_dim
        data = (ctypes.c_float * count).from_address(self.ggml.get_data(value))
        out = np.frombuffer(data, np.float32).copy()
        if form.endswith("rows"):
            by_row = out.reshape(c.batch, c.group, c.kv_heads, c.head_dim)
            out = np.ascontiguousarray(by_row.transpose(0, 2, 1, 3))
        return out.reshape(c.batch, c.queries, c.q_heads, c.head_dim)


if __name__ == "__main__":
    side.serve(FlashAttnExt(sys.argv[1] if len(sys.argv) > 1 else ""))
