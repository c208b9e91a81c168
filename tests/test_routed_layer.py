"""The native whole-layer decode against transformers' own modules on the same masks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from routing_helpers import WAYS, oracle_logits, route
from tiny import CASES, SHAPES, tiny_model
from widellm.kernels import cpu, dispatch, native
from widellm.modeling.attach import set_backend, set_batch_shared, set_budget, width_of
from widellm.modeling.roomy_cache import drop_last
from widellm.modeling.routed_layer import RoutedLayer
from widellm.routing.router import agreed

pytestmark = pytest.mark.skipif(not cpu.availability()[0], reason=f"native library: {cpu.availability()[1]}")


@torch.no_grad()
def step(model: Any, prompt: torch.Tensor, more: torch.Tensor, cache: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Prefill `prompt`, then feed `more` through the cache: its logits, and every sub-layer's masks of that step."""
    from transformers import DynamicCache, StaticCache

    filled: Any = DynamicCache(config=model.config)
    if cache == "static":
        filled = StaticCache(config=model.config, max_cache_len=64)
    if cache == "none":
        logits = model(more, use_cache=False).logits
        return logits, [s.keep.clone() for s in width_of(model).sublayers if s.keep is not None]
    model(prompt, past_key_values=filled)
    logits = model(more, past_key_values=filled).logits
    return logits, [s.keep.clone() for s in width_of(model).sublayers if s.keep is not None]


def used_natively(model: Any) -> bool:
    layers = model.model.layers
    return all(isinstance(m, RoutedLayer) and m._native[-1].fused is not None for m in layers)


@pytest.mark.requirement("R21")
@pytest.mark.parametrize(("family", "shape"), CASES)
@pytest.mark.parametrize("rows", [(1, 1), (3, 1), (2, 4)])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_native_layers_compute_what_the_modules_compute(
    family: str, shape: str, rows: tuple[int, int], cache: str
) -> None:
    model = tiny_model(family, **SHAPES[shape])
    route(model, head_group_size=2 if shape == "mha" else 1)
    native = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, 250, (rows[0], 9), generator=generator)
    more = torch.randint(0, 250, rows, generator=generator)
    set_backend(model, "masked")
    expected, keeps = step(model, prompt, more, cache)
    got, native_keeps = step(native, prompt, more, cache)
    assert used_natively(native) and not used_natively(model)
    assert all(torch.equal(a, b) for a, b in zip(keeps, native_keeps, strict=True)) and len(keeps) == 4
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("threads", [1, 3])
def test_decoding_natively_computes_what_an_untouched_model_computes_with_the_same_groups(
    way: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token, against zeroes put into the dense model by hooks, whatever the routers read and decide for."""
    monkeypatch.setattr(native, "GRAIN", 1)
    model, dense = tiny_model("qwen3", num_hidden_layers=4), tiny_model("qwen3", num_hidden_layers=4)
    width = route(model, **WAYS[way])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ids = torch.randint(0, 250, (2, 14), generator=torch.Generator().manual_seed(7))
        expected, keeps = oracle_logits(dense, width, ids)
        assert any(bool(keep.any()) for keep in keeps) and not all(bool(keep.all()) for keep in keeps)
        cache = None
        for t in range(ids.shape[1]):
            out = model(ids[:, t : t + 1], past_key_values=cache)
            cache = out.past_key_values
            assert used_natively(model)
            torch.testing.assert_close(out.logits[:, 0], expected[:, t], atol=1e-4, rtol=1e-3)
            for sub, keep in zip(width.sublayers, keeps, strict=True):
                assert sub.keep is not None and torch.equal(sub.keep[:, 0], keep[:, t])
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [(1, 1), (3, 1), (2, 4)])
@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
@pytest.mark.parametrize("shared", [False, True])
def test_all_routers_run_natively(way: str, rows: tuple[int, int], cache: str, shared: bool) -> None:
    """Against transformers' modules and the loops of `reference`, in both of the native layer's dtypes.

    In bfloat16 twice: with decisions by the tokens, of which a rounding may turn a few and with them the logits; and
    with biases so far from the thresholds that it cannot, where logits are always compared.
    """
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, 250, (rows[0], 9), generator=generator)
    more = torch.randint(0, 250, rows, generator=generator)
    for dtype, far in ((torch.float32, 0.0), (torch.bfloat16, 0.0), (torch.bfloat16, 64.0)):
        model = tiny_model("llama", dtype=dtype)
        width = route(model, **WAYS[way])
        for sub in width.sublayers:
            width.router(sub).bias += far * (-1.0) ** (torch.arange(sub.groups) + sub.layer_index)
        set_batch_shared(model, shared)
        plain, loops = copy.deepcopy(model), copy.deepcopy(model)
        set_backend(plain, "masked")
        set_backend(loops, "reference")
        got, keeps = step(model, prompt, more, cache)
        assert used_natively(model) and not used_natively(plain) and not used_natively(loops)
        kept = sum(int(keep.sum()) for keep in keeps)
        places = sum(keep.numel() for keep in keeps)
        assert len(keeps) == 4 and (far == 0.0 or 0 < kept < places)
        for other in (plain, loops):
            expected, others = step(other, prompt, more, cache)
            assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(keeps, others, strict=True))
            turned = sum(int((a != b).sum()) for a, b in zip(keeps, others, strict=True))
            if dtype == torch.float32:
                assert turned == 0
                torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)
                continue
            if "residual" in WAYS[way].values():
                # the first router reads the embeddings; behind it a stream that may differ by a rounding
                assert torch.equal(keeps[0], others[0])
            assert turned <= (max(2, places // 20) if far == 0.0 else 0)
            if turned == 0:
                assert (got - expected).abs().max() <= 0.05 * expected.abs().max()
        if WAYS[way].get("decision") == "layer":
            assert torch.equal(keeps[0], keeps[1]) and torch.equal(keeps[2], keeps[3])


def test_a_moved_weight_is_bound_again() -> None:
    model = tiny_model("llama")
    route(model)
    ids = torch.tensor([[5]])
    with torch.no_grad():
        before = model(ids).logits
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # new memory, same values; the old is freed
        torch.testing.assert_close(model(ids).logits, before)
        model.model.layers[0].mlp.up_proj.weight.mul_(2)  # same memory, new values
        assert not torch.equal(model(ids).logits, before)


def test_what_the_native_layer_cannot_do_goes_the_old_way() -> None:
    model = tiny_model("llama")
    route(model)
    ids = torch.tensor([[5, 6]])
    model(ids).logits.sum().backward()  # gradients are wanted
    assert not used_natively(model)
    seen = []
    hooked = model.model.layers[0].mlp.up_proj
    hooked.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    with torch.no_grad():
        model(ids)
    assert model.model.layers[1]._native[-1].fused is not None
    assert model.model.layers[0]._native[-1].fused is None and len(seen) == 1  # somebody looks inside: modules run


@pytest.mark.parametrize(
    "place", ["self_attn", "self_attn.o_proj", "mlp", "input_layernorm", "self_attn.q_proj.router"]
)
@pytest.mark.parametrize("way", WAYS)
def test_a_hook_put_in_after_the_first_native_call_is_called(place: str, way: str) -> None:
    model = tiny_model("llama")
    route(model, **WAYS[way])
    ids, seen = torch.tensor([[5, 6]]), []
    with torch.no_grad():
        model.generate(ids, max_new_tokens=4, do_sample=False)
        assert used_natively(model)
        for layer in model.model.layers:
            layer.get_submodule(place).register_forward_hook(lambda module, args, out: seen.append(module))
        model.generate(ids, max_new_tokens=4, do_sample=False)
    assert len(seen) == 4 * len(model.model.layers)


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
def test_what_watches_routers_of_bound_layers_sees_their_logits(way: str) -> None:
    model = tiny_model("llama")
    width = route(model, **WAYS[way])
    ids = torch.tensor([[5, 6, 7]])
    model(ids)
    assert used_natively(model)
    keeps, seen = [s.keep for s in width.sublayers], {}
    with width.watch(seen.__setitem__):
        model(ids)
    assert sorted(seen) == [0, 1, 2, 3]
    for place, keep in enumerate(keeps):
        assert torch.equal(seen[place] > width.sublayers[place].threshold, keep)


@torch.no_grad()
def test_without_regrouping_the_head_is_native_below_budget_one_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    route(model, regroup=False)
    calls: list[int] = []
    linear = cpu.linear
    monkeypatch.setattr(cpu, "linear", lambda *a: calls.append(1) or linear(*a))  # type: ignore[func-returns-value]
    model(torch.tensor([[5]]))
    assert len(calls) == 1
    set_budget(model, 1.0)
    model(torch.tensor([[5]]))
    assert len(calls) == 1  # the dense model's very bits are due
    set_backend(model, "cpu")
    model(torch.tensor([[5]]))
    assert len(calls) == 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("regroup", [True, False])
def test_budget_one_is_dense(regroup: bool, way: str) -> None:
    model, dense = tiny_model("llama"), tiny_model("llama")
    route(model, regroup=regroup, **WAYS[way])
    set_budget(model, 1.0)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        got, expected = model(ids).logits, dense(ids).logits
    if regroup:
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)
    else:
        assert torch.equal(got, expected)
    assert all(s.keep is None for s in width_of(model).sublayers)


@torch.no_grad()
def test_a_cache_with_room_grows_like_any_other() -> None:
    """Every way of touching a DynamicCache between two tokens: the next logits are those of a plain one."""
    from transformers import DynamicCache

    model = tiny_model("llama")
    route(model)
    plain = copy.deepcopy(model)
    set_backend(plain, "masked")  # its layers run as modules, on the cache's own update
    ids = torch.randint(0, 250, (2, 100), generator=torch.Generator().manual_seed(2))
    caches = [DynamicCache(config=m.config) for m in (model, plain)]

    def both(more: torch.Tensor, given: list[Any]) -> None:
        logits = [m(more, past_key_values=c).logits for m, c in zip((model, plain), given, strict=True)]
        torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-3)
        for ours, theirs in zip(given[0].layers, given[1].layers, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-5, rtol=1e-3)
            torch.testing.assert_close(ours.values, theirs.values, atol=1e-5, rtol=1e-3)

    both(ids[:, :5], caches)
    before = caches[0].layers[0].keys.clone()
    for t in range(5, 80):  # through the end of the first buffers
        both(ids[:, t : t + 1], caches)
    view = caches[0].layers[0].keys
    assert view.data_ptr() != 0 and view.stride(1) > view.shape[2] * view.shape[3]  # there is room
    torch.testing.assert_close(view[:, :, :5], before)

    deep = [copy.deepcopy(c) for c in caches]
    shallow = [copy.copy(c) for c in caches]
    for c in shallow:
        c.layers = [copy.copy(layer) for layer in c.layers]
    both(ids[:, 80:81], caches)
    both(ids[:, 90:91], deep)  # neither copy sees the other's token
    both(ids[:, 91:92], shallow)
    both(ids[:, 81:82], caches)
    both(ids[:, 92:95], deep)
    for c in caches:
        c.crop(-3)
    both(ids[:, 82:85], caches)
    address = caches[0].layers[0].keys.data_ptr()
    drop_last(caches[0], 2)  # crop, and the room stays
    caches[1].crop(-2)
    both(ids[:, 82:83], caches)
    assert caches[0].layers[0].keys.data_ptr() == address
    for c in caches:
        c.reorder_cache(torch.tensor([1, 0]))
    both(ids[:, 83:84], caches)
    both(ids[:, 84:100], caches)  # 32 rows in a call
    for c in caches:
        c.batch_select_indices(torch.tensor([1]))
    both(ids[:1, :1], caches)
    for c in caches:
        c.reset()
    both(ids[:, :1], caches)


@torch.no_grad()
@pytest.mark.parametrize("way", ["normed", "residual"])
def test_a_batch_agrees_where_it_was_asked_to(way: str) -> None:
    model = tiny_model("llama")
    width = route(model, **WAYS[way])
    by_ops = copy.deepcopy(model)
    set_backend(by_ops, "masked")
    ids = torch.randint(0, 250, (5, 1), generator=torch.Generator().manual_seed(3))
    model(ids)
    alone = [s.keep for s in width.sublayers]
    assert any(bool((keep != keep[:1]).any()) for keep in alone)
    for m in (model, by_ops):
        set_batch_shared(m, True)
    logits = [m(ids).logits for m in (model, by_ops)]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-3)
    first = width.sublayers[0]
    for mine, theirs in zip(width.sublayers, width_of(by_ops).sublayers, strict=True):
        assert mine.keep is not None and torch.equal(mine.keep, theirs.keep)
        assert bool((mine.keep == mine.keep[:1]).all())
    # the first sub-layer sees the same input either way: as many groups as its rows keep on average
    assert int(first.keep[0].sum()) == int(alone[0].sum() / 5 + 0.5)
    for shape in ((1, 1), (2, 3)):  # one sequence, or several tokens of each: everybody for himself
        more = torch.randint(0, 250, shape, generator=torch.Generator().manual_seed(4))
        together = model(more).logits
        set_batch_shared(model, False)
        assert torch.equal(model(more).logits, together)
        set_batch_shared(model, True)


def test_agreed_by_hand() -> None:
    logits = torch.tensor([[3.0, -1.0, 1.0, -9.0], [1.0, 2.0, -2.0, -9.0], [1.0, 2.0, -2.0, -9.0]])
    # 2 + 2 + 2 kept: 2 each; sums 5, 3, -3, -27
    assert agreed(logits, 0.0).tolist() == [[True, True, False, False]] * 3
    assert agreed(logits, -100.0).all() and not agreed(logits, 100.0).any()
    assert agreed(torch.zeros(2, 3), -1.0).all()
    assert agreed(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), 0.0).tolist() == [[True, True]] * 2  # 1.5 rounds up


@torch.no_grad()
@pytest.mark.parametrize("backend", ["cpu", "masked"])
def test_many_rows_at_budget_one_by_either_way(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, dense = tiny_model("llama"), tiny_model("llama")
    width = route(model)
    set_budget(model, 1.0)
    monkeypatch.setattr(dispatch, "decide", lambda *a: (backend, "for this test"))
    calls: list[int] = []
    native = cpu.routed_ffn
    monkeypatch.setattr(cpu, "routed_ffn", lambda *a, **k: calls.append(1) or native(*a, **k))  # type: ignore[func-returns-value]
    ids = torch.randint(0, 250, (2, 40), generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(model(ids).logits, dense(ids).logits, atol=1e-4, rtol=1e-3)
    assert len(calls) == (2 if backend == "cpu" else 0)
    assert all(s.keep is None for s in width.sublayers)
