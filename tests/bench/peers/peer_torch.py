"""PyTorch: scaled_dot_product_attention, and flex_attention compiled for the shape (argument `flex`)."""

import sys
import typing

import numpy as np

import protocol
import side


class Torch(side.Peer):
    """K and V [batch, kv_heads, tokens, head_dim], contiguous, in memory that exists before the call."""

    def version(self) -> str:
        try:
            import torch
        except ImportError:
            raise protocol.Skipped("torch is not installed") from None
        self.torch = torch
        return torch.__version__

    def _tensor(self, array: np.ndarray) -> typing.Any:
        if array.dtype == np.uint16:
            return self.torch.from_numpy(array.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(array)

    def prepare(self, case: protocol.Case, data: side.Data) -> None:
        self.case = case
        self.q = self._tensor(side.CONVERT[case.dtype](np.ascontiguousarray(data.q.transpose(0, 2, 1, 3))))
        self.layers = [(self._tensor(k), self._tensor(v)) for k, v in data.layers_by_head(case.dtype)]

    def _grouped_rows(self) -> typing.Any:
        """Decode: the query heads of a kv head as rows of one head, [batch, kv_heads, group, head_dim]. Each kv head is
        then read once, and nothing needs to be repeated."""
        return self.q.view(self.case.batch, self.case.kv_heads, self.case.group, self.case.head_dim)

    def result(self, form: str, value: typing.Any) -> np.ndarray:
        c = self.case
        by_head = value.float().reshape(c.batch, c.q_heads, c.queries, c.head_dim)
        return by_head.transpose(1, 2).contiguous().numpy()


class Sdpa(Torch):
    def forms(self, threads: int) -> dict[str, side.Call]:
        c, q = self.case, self.q
        torch, sdpa = self.torch, self.torch.nn.functional.scaled_dot_product_attention
        torch.set_num_threads(threads)
        causal = c.queries > 1

        @torch.inference_mode()
        def plain(layer: int) -> typing.Any:
            k, v = self.layers[layer]
            return sdpa(q, k, v, is_causal=causal)

        @torch.inference_mode()
        def gqa(layer: int) -> typing.Any:
            k, v = self.layers[layer]
            return sdpa(q, k, v, is_causal=causal, enable_gqa=True)

        if c.group == 1:
            return {"plain": plain}
        forms: dict[str, side.Call] = {"gqa": gqa}

        # Kv heads as batch and their query heads as heads: a view of K and V that repeats by a stride of 0.
        def repeated(x: typing.Any) -> typing.Any:
            by_kv_head = x.view(c.batch * c.kv_heads, 1, c.tokens, c.head_dim)
            return by_kv_head.expand(-1, c.group, -1, -1)

        q_by_kv_head = q.view(c.batch * c.kv_heads, c.group, c.queries, c.head_dim)
        views = [(repeated(k), repeated(v)) for k, v in self.layers]

        @torch.inference_mode()
        def expanded(layer: int) -> typing.Any:
            k, v = views[layer]
            return sdpa(q_by_kv_head, k, v, is_causal=causal)

        forms["expanded"] = expanded
        if c.queries == 1:
            q_rows = self._grouped_rows()

            @torch.inference_mode()
            def rows(layer: int) -> typing.Any:
                k, v = self.layers[layer]
                return sdpa(q_rows, k, v)

            forms["rows"] = rows
        return forms


class Flex(Torch):
    def version(self) -> str:
        version = super().version()
        try:
            from torch.nn.attention import flex_attention
        except ImportError:
            raise protocol.Skipped("this torch has no flex_attention") from None
        self.flex = flex_attention
        return version

    def _compiled(self) -> typing.Callable[..., typing.Any]:
        # Compiled anew, and for this shape alone: a second shape would otherwise make all sizes variables.
        self.torch.compiler.reset()
        return self.torch.compile(self.flex.flex_attention, dynamic=False)

    def forms(self, threads: int) -> dict[str, side.Call]:
        c, q, torch = self.case, self.q, self.torch
        torch.set_num_threads(threads)
        attention = self._compiled()
        mask = None
        if c.queries > 1:
            mask = self.flex.create_block_mask(
                lambda b, h, row, column: row >= column, None, None, c.queries, c.tokens, device="cpu"
            )

        @torch.inference_mode()
        def gqa(layer: int) -> typing.Any:
            k, v = self.layers[layer]
            return attention(q, k, v, block_mask=mask, enable_gqa=c.group > 1)

        forms: dict[str, side.Call] = {"gqa" if c.group > 1 else "plain": gqa}
        if c.queries == 1 and c.group > 1:
            q_rows = self._grouped_rows()

            @torch.inference_mode()
            def rows(layer: int) -> typing.Any:
                k, v = self.layers[layer]
                return attention(q_rows, k, v)

            forms["rows"] = rows
        for name in list(forms):
            try:
                forms[name](0)
            except Exception as error:  # the compiler's own and its C++ compiler's, of many types
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                print(f"flex_attention, form {name}: {reason}", file=sys.stderr)
                del forms[name]
        if not forms:
            raise protocol.Skipped("torch.compile of flex_attention fails here (the reason is above)")
        return forms


if __name__ == "__main__":
    side.serve(Flex() if "flex" in sys.argv[1:] else Sdpa())
