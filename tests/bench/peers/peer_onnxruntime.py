"""onnxruntime: a model of one GroupQueryAttention node, past and present in one buffer, everything bound beforehand."""

import os
import typing

import numpy as np

import protocol
import side


class GroupQueryAttention(side.Peer):
    def version(self) -> str:
        try:
            import onnx
            import onnxruntime
        except ImportError as missing:
            raise protocol.Skipped(f"{missing.name} is not installed") from None
        self.onnx, self.ort = onnx, onnxruntime
        return onnxruntime.__version__

    def prepare(self, case: protocol.Case, data: side.Data) -> None:
        if case.dtype != "f32":
            raise protocol.Skipped("its GroupQueryAttention on the CPU has no bfloat16")
        self.case = case
        self.layers = data.layers_by_head("f32")
        # The call's own tokens are inputs beside the cache, and the node writes them there: as it does in a model.
        rows = (case.batch, case.queries, -1)
        self.inputs = {
            "query": np.ascontiguousarray(data.q.reshape(rows)),
            "key": np.ascontiguousarray(data.k[:, case.tokens - case.queries :].reshape(rows)),
            "value": np.ascontiguousarray(data.v[:, case.tokens - case.queries :].reshape(rows)),
            "seqlens_k": np.full(case.batch, case.tokens - 1, np.int32),
            "total_sequence_length": np.array([case.tokens], np.int32),
        }
        self.out = np.zeros_like(self.inputs["query"])
        self.model = self._model()

    def _model(self) -> bytes:
        helper, kinds = self.onnx.helper, self.onnx.TensorProto
        cache = self.layers[0][0].shape
        names = ["query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length"]
        node = helper.make_node(
            "GroupQueryAttention",
            names,
            ["output", "present_key", "present_value"],
            num_heads=self.case.q_heads,
            kv_num_heads=self.case.kv_heads,
            domain="com.microsoft",
        )

        def info(name: str) -> typing.Any:
            if "past" in name or "present" in name:
                return helper.make_tensor_value_info(name, kinds.FLOAT, cache)
            array = self.out if name == "output" else self.inputs[name]
            kind = kinds.INT32 if array.dtype == np.int32 else kinds.FLOAT
            return helper.make_tensor_value_info(name, kind, array.shape)

        graph = helper.make_graph([node], "gqa", [info(n) for n in node.input], [info(n) for n in node.output])
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()

    def _session(self, threads: int, flash: bool) -> typing.Any:
        options = self.ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # Read when the session is made.
        os.environ["ORT_GQA_DISABLE_FLASH_ATTENTION"] = "0" if flash else "1"
        return self.ort.InferenceSession(self.model, options, providers=["CPUExecutionProvider"])

    def _binding(self, session: typing.Any, k: np.ndarray, v: np.ndarray) -> typing.Any:
        binding = session.io_binding()

        def bind(bind_one: typing.Callable[..., None], name: str, array: np.ndarray) -> None:
            bind_one(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

        for name, array in self.inputs.items():
            bind(binding.bind_input, name, array)
        for name, array in (("key", k), ("value", v)):
            bind(binding.bind_input, f"past_{name}", array)
            bind(binding.bind_output, f"present_{name}", array)
        bind(binding.bind_output, "output", self.out)
        return binding

    def forms(self, threads: int) -> dict[str, side.Call]:
        def form(flash: bool) -> side.Call:
            session = self._session(threads, flash)
            bindings = [self._binding(session, k, v) for k, v in self.layers]
            return lambda layer: session.run_with_iobinding(bindings[layer])

        return {"flash": form(flash=True), "naive": form(flash=False)}

    def result(self, form: str, value: object) -> np.ndarray:
        c = self.case
        return self.out.reshape(c.batch, c.queries, c.q_heads, c.head_dim)


if __name__ == "__main__":
    side.serve(GroupQueryAttention())
