"""One pre-norm decoder layer for a few rows (decode): one native call, or two around the update of a full cache.

    q, k, v, keep = layer.qkv(x, cos, sin)              # norm, router, q of kept heads, k, v, biases, q/k norm, rotary
    k, v = cache.update(k, v, index)                    # transformers' public cache, any kind
    x, ffn_keep = layer.rest(x, q, keep, k, v)          # attention, o, residual, norm, router, FFN, residual

or, where the cache has room for the new tokens, in one: `layer.step(x, cos, sin, k, v)`.

At small sizes a decoder spends its time between the ops; here a layer costs a call of some microseconds. Values
are rounded to the model's dtype where transformers' eager code rounds them (after each linear map, each norm and its
weight, each half of the rotary sum, the activation, the product, each residual sum); sums inside are float32, and
attention probabilities are rounded before their sum is divided out, as flash attention does. Greedy text agrees with
eager's mostly, not always. A row's result does not depend on its batch mates or on the number of threads.

Nothing here knows transformers: `bind` takes plain tensors. The layer must be
x + o(attention(norm(x))), then x + ffn(norm(x)), with RMSNorm, rotary embeddings in the rotate-half convention, and
linear maps in nn.Linear layout. All tensors on the CPU, one dtype (float32 or bfloat16); routers float32. The weights
of the linear maps may all be `Int8` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Structure, addressof

import torch
from torch import Tensor

from widellm.kernels import native
from widellm.kernels.cpu import (
    Int8,
    Router,
    Weight,
    check,
    either_matrix,
    mask_fields,
    matrix,
    router_fields,
    rows_of,
    scale_of,
    start_pointer,
    vector,
)

_OP = "fused layer"


class FusedLayer:
    """A layer bound to live weights: see the module's text. Make one with `bind`; it is cheap to keep and has no state
    besides the thresholds and whether a batch agrees."""

    def __init__(self, struct: Structure, bound: list[tuple[Tensor, Tensor]], work: int) -> None:
        self._struct = struct
        self._bound = [(t, alias.data_ptr()) for t, alias in bound]
        self._alive = [alias for _, alias in bound]
        self._work = work
        self._dtype = bound[0][1].dtype
        self._hidden, self._heads, self._kv_heads = struct.hidden, struct.heads, struct.kv_heads
        self._dim, self._rotary = struct.head_dim, struct.rotary_dim
        self._attn_groups, self._ffn_groups = struct.attn_groups, struct.ffn_groups
        self._router_maps = (struct.attn_router.down, struct.ffn_router.down)
        self.sizes = (
            self._dtype,
            self._hidden,
            self._kv_heads,
            self._dim,
            self._rotary,
            self._attn_groups,
            self._ffn_groups,
        )
        """What the layers of one `FusedStack` have in common."""
        self._max_rows = native.few_rows()
        self._call_qkv: Callable[..., int] = native.library().widellm_layer_qkv
        self._call_rest: Callable[..., int] = native.library().widellm_layer_rest
        self._call_step: Callable[..., int] = native.library().widellm_layer_step

    @classmethod
    def bind(
        cls,
        *,
        attn_norm: Tensor,
        ffn_norm: Tensor,
        w_q: Weight,
        w_k: Weight,
        w_v: Weight,
        w_o: Weight,
        w_gate: Weight | None,
        w_up: Weight,
        w_down: Weight,
        head_dim: int,
        act: str,
        attn_eps: float,
        ffn_eps: float,
        b_q: Tensor | None = None,
        b_k: Tensor | None = None,
        b_v: Tensor | None = None,
        b_o: Tensor | None = None,
        b_gate: Tensor | None = None,
        b_up: Tensor | None = None,
        b_down: Tensor | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        qk_eps: float = 1e-6,
        rotary_dim: int | None = None,
        scale: float | None = None,
        attn_router: Router | None = None,
        ffn_router: Router | None = None,
        reads_stream: bool = False,
        one_decision: bool = False,
        isa: str | None = None,
    ) -> FusedLayer:
        """Check everything once and keep pointers.

        Shapes: norms [D], w_q [H d, D], w_k and w_v [K d, D], w_o [D, H d], w_gate and w_up [F, D], w_down [D, F],
        biases of each map's outputs, q_norm and k_norm [d] (Qwen3). w_o and w_down are best input-major (`stored.t()`
        of a contiguous [H d, D] or [F, D] tensor). rotary_dim: leading elements of a head that rotate, default all.
        scale: of the scores, default d ** -0.5. A router's `up` [G, r] sets the number of groups; None: never routed.
        reads_stream: routers read the layer's input, and the sum after attention, in place of what the norms give.
        one_decision: the FFN keeps what the attention keeps, group by group; of its router only `up`'s size counts.
        Raises ValueError on sizes and dtypes, BackendError on layouts or where the native backend is missing.
        """
        dtype = attn_norm.dtype
        (hidden,), d = attn_norm.shape, head_dim
        heads, kv_heads, inner = w_q.shape[0] // d, w_k.shape[0] // d, w_up.shape[0]
        maps = {"q": w_q, "k": w_k, "v": w_v, "o": w_o, "gate": w_gate, "up": w_up, "down": w_down}
        layer = native.Layer(run=native.run_fields(dtype, isa, 0, *maps.values()))
        layer.hidden, layer.inner, layer.heads, layer.kv_heads, layer.head_dim = hidden, inner, heads, kv_heads, d
        layer.rotary_dim = d if rotary_dim is None else rotary_dim
        layer.attn_groups = 1 if attn_router is None else attn_router.up.shape[0]
        layer.ffn_groups = 1 if ffn_router is None else ffn_router.up.shape[0]
        if act not in native.ACTIVATIONS:
            raise ValueError(f"{_OP}: act must be one of {', '.join(native.ACTIVATIONS)}, got {act!r}")
        if kv_heads < 1 or heads % kv_heads or layer.rotary_dim % 2 or not 0 <= layer.rotary_dim <= d:
            raise ValueError(
                f"{_OP}: {kv_heads} KV heads and {layer.rotary_dim} rotary dimensions do not fit {heads} heads of {d}"
            )
        for groups, size, name in ((layer.attn_groups, heads, "heads"), (layer.ffn_groups, inner, "channels")):
            if groups < 1 or size % groups:
                raise ValueError(f"{_OP}: {groups} groups do not divide {size} {name}")
        if one_decision and layer.attn_groups != layer.ffn_groups:
            raise ValueError(
                f"{_OP}: one decision needs as many groups of heads as of channels, got {layer.attn_groups} and "
                f"{layer.ffn_groups}"
            )
        layer.reads_stream, layer.one_decision = int(reads_stream), int(one_decision)
        layer.act = native.ACTIVATIONS[act]
        layer.attn_eps, layer.ffn_eps, layer.qk_eps = attn_eps, ffn_eps, qk_eps
        layer.scale = d**-0.5 if scale is None else scale
        for field, vec, size in (
            ("attn_norm", attn_norm, hidden),
            ("ffn_norm", ffn_norm, hidden),
            ("q_norm", q_norm, d),
            ("k_norm", k_norm, d),
            ("bq", b_q, heads * d),
            ("bk", b_k, kv_heads * d),
            ("bv", b_v, kv_heads * d),
            ("bo", b_o, hidden),
            ("gate_bias", b_gate, inner),
            ("up_bias", b_up, inner),
            ("down_bias", b_down, hidden),
        ):
            setattr(layer, field, vector(_OP, field, vec, size, dtype))
        layer.wq, layer.ldq = matrix(_OP, "w_q", w_q, (heads * d, hidden), dtype)
        layer.wk, layer.ldk = matrix(_OP, "w_k", w_k, (kv_heads * d, hidden), dtype)
        layer.wv, layer.ldv = matrix(_OP, "w_v", w_v, (kv_heads * d, hidden), dtype)
        layer.wo, layer.ldo, layer.o_input_major = either_matrix(_OP, "w_o", w_o, (hidden, heads * d), dtype)
        if w_gate is not None:
            layer.gate, layer.ldgate = matrix(_OP, "w_gate", w_gate, (inner, hidden), dtype)
        layer.up, layer.ldup = matrix(_OP, "w_up", w_up, (inner, hidden), dtype)
        layer.down, layer.lddown, layer.down_input_major = either_matrix(_OP, "w_down", w_down, (hidden, inner), dtype)
        for name, w in maps.items():
            setattr(layer, f"{name}_scale", scale_of(_OP, f"w_{name}", w))
        layer.attn_router = router_fields(_OP, attn_router, hidden, layer.attn_groups)
        layer.ffn_router = router_fields(_OP, ffn_router, hidden, layer.ffn_groups)
        tensors = [attn_norm, ffn_norm, q_norm, k_norm, b_q, b_k, b_v, b_o, b_gate, b_up, b_down]
        for w in maps.values():
            tensors += [w.q, w.scale] if isinstance(w, Int8) else [w]
        for router in (attn_router, ffn_router):
            if router is not None:
                tensors += [router.down, router.up, router.bias]
        # The detached alias keeps the memory alive even when the module swaps the parameter's data.
        bound = [(t, t.detach()) for t in tensors if t is not None]
        work = (heads * d + (inner if w_gate is None else 2 * inner)) * hidden
        return cls(layer, bound, work)

    def stale(self) -> bool:
        """Whether a bound parameter's data moved (`.to()`, a swapped `.data`): then bind again. Some microseconds."""
        for t, pointer in self._bound:
            if t.data_ptr() != pointer:  # the old memory is kept alive, so nothing new can have its address
                return True
        return False

    def settle(self) -> None:
        """Have the weights held in large pages where the system can: they are read up to a sixth faster."""
        for alias in self._alive:
            native.large_pages(alias)

    def set_thresholds(self, attn: float | None, ffn: float | None) -> None:
        """Thresholds of the two routers; None turns a router off (everything is kept). Ignored where none is bound."""
        routers = (self._struct.attn_router, self._struct.ffn_router)
        for router, down, threshold in zip(routers, self._router_maps, (attn, ffn), strict=True):
            router.down = None if threshold is None else down
            router.threshold = 0.0 if threshold is None else threshold

    def set_shared(self, shared: bool) -> None:
        """Whether sequences with one token each agree on one set of groups per call; see `routing.router.agreed`."""
        self._struct.attn_router.shared = self._struct.ffn_router.shared = int(shared)

    @property
    def max_rows(self) -> int:
        """Most rows B * T that one call takes."""
        return self._max_rows

    @property
    def address(self) -> int:
        """Where the native form of the layer is."""
        return addressof(self._struct)

    def threads(self, rows: int) -> int:
        """With how many threads a call of so many rows runs."""
        return min(torch.get_num_threads(), 1 + rows * self._work // native.GRAIN)

    def inputs(
        self, x: Tensor, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
        """x, cos and sin as the library reads them, and the stride of cos and sin per sequence. Raises ValueError."""
        x = self._input(x)
        return x, *self._ropes(cos, sin, x.shape[0], x.shape[1])

    def _input(self, x: Tensor) -> Tensor:
        if x.ndim != 3 or x.shape[2] != self._hidden or x.dtype != self._dtype or x.device.type != "cpu":
            check(_OP, "x", x, (*x.shape[:2], self._hidden), self._dtype)
            raise ValueError(f"{_OP}: x must be [B, T, {self._hidden}], got {list(x.shape)}")
        if not 0 < x.shape[0] * x.shape[1] <= self._max_rows:
            raise ValueError(f"{_OP}: takes 1 to {self._max_rows} rows, got {x.shape[0]} x {x.shape[1]}")
        self._struct.run.threads = self.threads(x.shape[0] * x.shape[1])
        return x if x.is_contiguous() else x.contiguous()

    def qkv(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [B, T, D], cos and sin [B or 1, T, rotary_dim] (None: no rotary) -> q [B, H, T, d], k, v [B, K, T, d] and
        keep bool [B, T, G]. Dropped heads of q are zeros. Raises ValueError on shapes, dtypes, too many rows."""
        x = self._input(x)
        batch, tokens, _ = x.shape
        dtype, d = self._dtype, self._dim
        cos, sin, rope_batch = self._ropes(cos, sin, batch, tokens)
        q = torch.empty(batch, self._heads, tokens, d, dtype=dtype)
        k = torch.empty(batch, self._kv_heads, tokens, d, dtype=dtype)
        v = torch.empty(batch, self._kv_heads, tokens, d, dtype=dtype)
        keep = torch.empty(batch, tokens, self._attn_groups, dtype=torch.bool)
        call = native.Qkv(
            batch,
            tokens,
            x.data_ptr(),
            self._hidden,
            None if cos is None else cos.data_ptr(),
            None if sin is None else sin.data_ptr(),
            rope_batch,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            keep.data_ptr(),
        )
        if self._call_qkv(self._struct, call):
            raise MemoryError(f"{_OP}: out of memory")
        return q, k, v, keep

    def _ropes(
        self, cos: Tensor | None, sin: Tensor | None, batch: int, tokens: int
    ) -> tuple[Tensor | None, Tensor | None, int]:
        """The two as the library reads them, and their stride per sequence."""
        if cos is None or sin is None:
            if cos is not sin:
                raise ValueError(f"{_OP}: cos and sin must be given together")
            return None, None, 0
        shape, dtype = (cos.shape[0], tokens, self._rotary), self._dtype
        if cos.shape != shape or cos.shape[0] not in (1, batch) or cos.dtype != dtype or not cos.is_contiguous():
            cos = self._rope("cos", cos, batch, tokens)
        if sin.shape != cos.shape or sin.dtype != dtype or not sin.is_contiguous():
            sin = self._rope("sin", sin, cos.shape[0], tokens)
        return cos, sin, tokens * self._rotary if cos.shape[0] == batch and batch > 1 else 0

    def _rope(self, name: str, t: Tensor, batch: int, tokens: int) -> Tensor:
        if t.ndim != 3 or t.shape[0] not in (1, batch):
            raise ValueError(f"{_OP}: {name} must be [1 or {batch}, {tokens}, {self._rotary}], got {list(t.shape)}")
        check(_OP, name, t, (t.shape[0], tokens, self._rotary), self._dtype)
        return t.contiguous()

    def step(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        ffn: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`qkv` and `rest` in one call: (output [B, T, D], keep bool [B, T, G] of the heads, the same of the FFN).

        ffn False: the attention step alone (router, q, k and v, attention over the cache, o, residual); the last
        tensor then has no groups.

        k and v [B, K, Tk, d], contiguous along d: caches with room, whose last T positions the call writes.
        Raises ValueError on shapes, dtypes, strides.
        """
        x = self._input(x)
        batch, tokens, _ = x.shape
        cos, sin, rope_batch = self._ropes(cos, sin, batch, tokens)
        tk, dtype = k.shape[2], self._dtype
        shape = (batch, self._kv_heads, tk, self._dim)
        k_batch, k_head, k_token, k_last = k.stride()
        v_batch, v_head, v_token, v_last = v.stride()
        fits = k.shape == shape and v.shape == shape and k.dtype == dtype and v.dtype == dtype and tk >= tokens
        if not fits or k_last != 1 or v_last != 1:
            for name, t in (("k", k), ("v", v)):
                check(_OP, name, t, (batch, self._kv_heads, max(tk, tokens), self._dim), dtype)
            raise ValueError(f"{_OP}: k and v must be contiguous along d, got strides {k.stride()} and {v.stride()}")
        out = torch.empty(batch, tokens, self._hidden, dtype=dtype)
        keep = torch.empty(batch, tokens, self._attn_groups, dtype=torch.bool)
        ffn_keep = torch.empty(batch, tokens, self._ffn_groups if ffn else 0, dtype=torch.bool)
        x_at, keep_at = x.data_ptr(), keep.data_ptr()
        qkv = native.Qkv(
            batch, tokens, x_at, self._hidden, None if cos is None else cos.data_ptr(),
            None if sin is None else sin.data_ptr(), rope_batch, None, None, None, keep_at,
        )  # fmt: skip
        rest = native.Rest(
            batch, tokens, tk, x_at, self._hidden, None, keep_at,
            k.data_ptr(), k_batch, k_token, k_head, v.data_ptr(), v_batch, v_token, v_head,
        )  # fmt: skip
        alive = mask_fields(_OP, rest, mask, batch, tokens, tk)
        rest.causal, rest.attention_only = mask is None, not ffn
        rest.out, rest.ffn_keep = out.data_ptr(), ffn_keep.data_ptr()
        if self._call_step(self._struct, qkv, rest):
            raise MemoryError(f"{_OP}: out of memory")
        del alive
        return out, keep, ffn_keep

    def rest(
        self,
        x: Tensor,
        q: Tensor,
        keep: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        start: Tensor | None = None,
        causal: bool | None = None,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The layer's output [B, T, D] and the FFN's keep, bool [B, T, G].

        x is the input that `qkv` got; q and keep are what it gave; k and v [B, K, Tk, d] come from the cache, with any
        strides. mask, start, causal, window: as `cpu.routed_attention`. Raises ValueError on shapes and dtypes.
        """
        x = self._input(x)
        batch, tokens, _ = x.shape
        tk, dtype, d = k.shape[2], self._dtype, self._dim
        shape = (batch, self._kv_heads, tk, d)
        if k.shape != shape or v.shape != shape or k.dtype != dtype or v.dtype != dtype or tk < tokens:
            check(_OP, "k", k, (batch, self._kv_heads, max(tk, tokens), d), dtype)
            check(_OP, "v", v, shape, dtype)
        if q.shape != (batch, self._heads, tokens, d) or q.dtype != dtype or not q.is_contiguous():
            check(_OP, "q", q, (batch, self._heads, tokens, d), dtype)
            q = q.contiguous()
        if keep.shape != (batch, tokens, self._attn_groups) or keep.dtype != torch.bool or not keep.is_contiguous():
            check(_OP, "keep", keep, (batch, tokens, self._attn_groups), torch.bool)
            keep = keep.contiguous()
        k, v = rows_of(k), rows_of(v)
        out = torch.empty(batch, tokens, self._hidden, dtype=dtype)
        ffn_keep = torch.empty(batch, tokens, self._ffn_groups, dtype=torch.bool)
        k_batch, k_head, k_token, _ = k.stride()
        v_batch, v_head, v_token, _ = v.stride()
        call = native.Rest(
            batch, tokens, tk, x.data_ptr(), self._hidden, q.data_ptr(), keep.data_ptr(),
            k.data_ptr(), k_batch, k_token, k_head, v.data_ptr(), v_batch, v_token, v_head,
        )  # fmt: skip
        alive = mask_fields(_OP, call, mask, batch, tokens, tk)
        call.start = start_pointer(_OP, start, batch)
        call.causal = (mask is None) if causal is None else causal
        call.window = window or 0
        call.out, call.ffn_keep = out.data_ptr(), ffn_keep.data_ptr()
        if self._call_rest(self._struct, call):
            raise MemoryError(f"{_OP}: out of memory")
        del alive
        return out, ffn_keep
