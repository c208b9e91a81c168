"""What every supported model family must do, on a tiny random model: one function per promise.

tests/test_families.py runs all of them for all models of tiny.CONTRACT; tools/supported_models.py makes the table.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from routing_helpers import oracle_logits, route
from tiny import CONTRACT, tiny_model, tiny_tokenizer
from widellm.calibrate.calibration import Settings, calibrate
from widellm.calibrate.stream import walk_back
from widellm.families import locate
from widellm.kernels.registry import backends
from widellm.modeling.attach import detach, set_backend, set_budget, width_of
from widellm.modeling.checkpoint import load, save

NO_STATIC_CACHE = ("falcon-alibi",)
"""The dense model cannot use one either."""


def make(name: str) -> Any:
    """The model of that name in tiny.CONTRACT."""
    family, overrides = CONTRACT[name]
    return tiny_model(family, **overrides)


def tokens(*shape: int, seed: int = 1) -> Tensor:
    """Random token ids."""
    return torch.randint(0, 250, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits_of(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    return model(ids, **kwargs).logits


def check_dense(name: str) -> None:
    """At budget 1.0 the attached model is the dense one: the same bits, or rounding where channels are regrouped."""
    model, ids = make(name), tokens(2, 11)
    before = logits_of(model, ids)
    route(model, regroup=False)
    set_budget(model, 1.0)
    assert torch.equal(logits_of(model, ids), before)
    regrouped = make(name)
    route(regrouped)
    set_budget(regrouped, 1.0)
    torch.testing.assert_close(logits_of(regrouped, ids), before, atol=2e-5, rtol=2e-5)


def check_masks(name: str) -> None:
    """On every backend, a routed model is the dense one with the dropped heads and channels zeroed."""
    for head_group_size in (1, 2):
        model, ids = make(name), tokens(2, 11)
        dense = copy.deepcopy(model)
        width = route(model, head_group_size=head_group_size)
        expected, keeps = oracle_logits(dense, width, ids)
        for backend in [b for b, (usable, _) in backends().items() if usable] + ["auto"]:
            set_backend(model, backend)
            got = logits_of(model, ids)
            for sub, keep in zip(width.sublayers, keeps, strict=True):
                assert sub.keep is not None and torch.equal(sub.keep, keep)
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)
        share = torch.stack([keep.float().mean() for keep in keeps]).mean()
        assert 0.1 < share < 0.9  # the check would prove nothing if all were kept or dropped


def check_padding(name: str) -> None:
    """A sequence's logits, masks and generated text do not depend on its batch mates or on padding, left or right."""
    model = make(name)
    width = route(model)
    sequences = [tokens(n, seed=n) for n in (3, 11, 7, 1)]
    longest = max(len(s) for s in sequences)
    for side in ("left", "right"):
        batch = torch.zeros(len(sequences), longest, dtype=torch.long)
        mask = torch.zeros_like(batch)
        for row, s in enumerate(sequences):
            where = slice(longest - len(s), longest) if side == "left" else slice(0, len(s))
            batch[row, where], mask[row, where] = s, 1
        together = logits_of(model, batch, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(0))
        keeps = [sub.keep.clone() for sub in width.sublayers if sub.keep is not None]
        for row, s in enumerate(sequences):
            alone, real = logits_of(model, s[None])[0], mask[row].bool()
            torch.testing.assert_close(together[row][real], alone, atol=1e-4, rtol=1e-3)
            for keep, sub in zip(keeps, width.sublayers, strict=True):
                assert sub.keep is not None and torch.equal(keep[row][real], sub.keep[0])

    batch = torch.stack([tokens(7), torch.cat([torch.zeros(4, dtype=torch.long), tokens(3)])])
    mask = torch.ones_like(batch)
    mask[1, :4] = 0
    written = greedy(model, batch, attention_mask=mask)
    assert torch.equal(written[0, 7:], greedy(model, tokens(1, 7))[0, 7:])
    assert torch.equal(written[1, 7:], greedy(model, tokens(1, 3))[0, 3:])


def greedy(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model.generate(ids, do_sample=False, max_new_tokens=8, min_new_tokens=8, pad_token_id=258, **kwargs)


def check_cache(name: str) -> None:
    """generate() writes the same tokens with and without a cache; single steps give the logits of a whole forward."""
    model, ids = make(name), tokens(2, 9)
    width = route(model)
    without = greedy(model, ids, use_cache=False)
    assert torch.equal(greedy(model, ids), without)
    if name not in NO_STATIC_CACHE:
        assert torch.equal(greedy(model, ids, cache_implementation="static"), without)
    whole = logits_of(model, without)
    keeps = [sub.keep.clone() for sub in width.sublayers if sub.keep is not None]
    cache = DynamicCache(config=model.config)
    logits_of(model, ids, past_key_values=cache)
    for place in range(ids.shape[1], without.shape[1]):
        step = logits_of(model, without[:, place : place + 1], past_key_values=cache)
        torch.testing.assert_close(step[:, 0], whole[:, place], atol=2e-4, rtol=1e-3)
        for keep, sub in zip(keeps, width.sublayers, strict=True):
            assert sub.keep is not None and torch.equal(sub.keep[:, 0], keep[:, place])


def check_beams(name: str) -> None:
    """Beam search gives the same tokens with and without a cache."""
    model, ids = make(name), tokens(1, 9)
    route(model)
    assert torch.equal(greedy(model, ids, num_beams=3), greedy(model, ids, num_beams=3, use_cache=False))


def check_saving(name: str) -> None:
    """A saved directory loads to the same logits, and its dense model comes back from it."""
    dense, model, ids = make(name), make(name), tokens(2, 11)
    route(model)
    expected = logits_of(model, ids)
    with TemporaryDirectory() as folder:
        save(model, Path(folder) / "routed", tiny_tokenizer())
        loaded, _ = load(Path(folder) / "routed", budget=0.5)
    assert torch.equal(logits_of(loaded, ids), expected)
    torch.testing.assert_close(logits_of(detach(loaded), ids), logits_of(dense, ids), atol=2e-5, rtol=2e-5)


def check_detach(name: str) -> None:
    """Detaching gives back every weight's bits, every module's class, and nothing is left behind."""
    model, ids = make(name), tokens(2, 11)
    before, weights = logits_of(model, ids), {k: v.clone() for k, v in model.state_dict().items()}
    classes, strides = [type(m) for m in model.modules()], [p.stride() for p in model.parameters()]
    route(model)
    logits_of(model, ids)
    detach(model)
    after = model.state_dict()
    assert list(after) == list(weights) and all(torch.equal(after[k], weights[k]) for k in weights)
    assert [type(m) for m in model.modules()] == classes and [p.stride() for p in model.parameters()] == strides
    assert torch.equal(logits_of(model, ids), before)
    assert not [n for m in model.modules() for n in vars(m) if n in ("_width", "_parts", "_widellm", "_native")]


def check_gradients(name: str) -> None:
    """The backward walk, dense and routed, gives each sub-layer's true input and gradient."""
    _compare_gradients(name, 1.0)
    _compare_gradients(name, 0.5)


def _compare_gradients(name: str, budget: float) -> None:
    model, ids = make(name), tokens(1, 9)
    width = route(model)
    set_budget(model, budget)
    layout = width.layout
    loss = torch.randn(9, 272, generator=torch.Generator().manual_seed(3))
    found = [sample for samples in walk_back(model, layout, ids[0], lambda logits: loss) for sample in samples]
    order = [(i, kind) for i in reversed(range(len(layout.layers))) for kind in layout.family.kinds]
    assert [(sample.layer_index, sample.kind) for sample in found] == order
    inputs: dict[tuple[int, str], Tensor] = {}
    outputs: dict[tuple[int, str], Tensor] = {}

    def note(key: tuple[int, str]) -> Callable[..., Tensor]:
        def hook(module: Any, args: Any, output: Any) -> Tensor:
            inputs[key], outputs[key] = args[0], output.clone()  # a clone, since Falcon adds onto it in place
            outputs[key].retain_grad()
            return outputs[key]

        return hook

    for index, kind in order:
        layout.layers[index].exit(kind).register_forward_hook(note((index, kind)))
    (model(ids).logits[0] * loss).sum().backward()
    for sample in found:
        key = (sample.layer_index, sample.kind)
        torch.testing.assert_close(sample.g, outputs[key].grad.reshape(sample.g.shape), atol=1e-4, rtol=1e-3)
        if sample.kind == "ffn" and layout.layers[0].mlp is not None:
            torch.testing.assert_close(sample.x, inputs[key].reshape(sample.x.shape), atol=1e-5, rtol=1e-4)


def check_training(name: str) -> None:
    """A gate that weighs groups by 1 or 0 computes what the routed model computes, and its gradient reaches routers."""
    model, ids = make(name), tokens(2, 11)
    width = route(model)
    expected = logits_of(model, ids)
    keeps = [sub.keep for sub in width.sublayers]
    for sub in width.sublayers:
        sub.gate = _straight_through
    logits = model(ids).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-3)
    logits.square().sum().backward()
    for sub, keep in zip(width.sublayers, keeps, strict=True):
        assert sub.keep is not None and keep is not None and torch.equal(sub.keep, keep)
        assert all(p.grad is not None and bool(p.grad.any()) for p in width.router(sub).parameters())


def _straight_through(sub: Any, logits: Tensor) -> Tensor:
    soft = torch.sigmoid(logits - sub.threshold)
    return (logits > sub.threshold).float() + soft - soft.detach()


def check_calibration(name: str) -> None:
    """Calibration runs, and its dial spends about what it says on the text it was made on."""
    model = make(name)
    windows = tokens(16, 32)
    calibrate(model, windows, Settings(ffn_group_size=8, router_rank=4))
    width = width_of(model)
    assert width.dial is not None
    for budget in (0.5, 0.8):
        set_budget(model, budget)
        counter = width.counter()
        logits_of(model, windows)
        counter.add(None, (16, 32))
        assert abs(1.0 - counter.work(budget).saved_routable - budget) < 0.08


def check_work(name: str) -> None:
    """Accounting: what is routable is counted from the weights themselves, what is spent from the masks."""
    model, ids = make(name), tokens(2, 11)
    layout = locate(model)
    per_head = (1 if layout.family.whole_q else 2) * layout.head_dim * layout.hidden_size
    first = layout.layers[0]
    linears = {id(p): p for p in first.layer.parameters() if p.ndim > 1}.values()
    width = route(model)
    sizes = {"attention": layout.num_attention_heads * per_head}
    if "ffn" in layout.family.kinds:
        ffn = {id(m): m.weight.numel() for m in (first.gate_proj, first.up_proj, first.down_proj) if m is not None}
        sizes["ffn"] = sum(ffn.values())
        every = sum(p.numel() for p in linears)
    else:  # 2 of 4 experts
        every = sum(p.numel() // (2 if p.ndim == 3 else 1) for p in linears)
    counter = width.counter()
    assert abs(counter.routable_share - sum(sizes.values()) / every) < 1e-9
    logits_of(model, ids)
    counter.add(None, (2, 11))
    spent = 0.0
    for sub in width.sublayers:
        assert sub.keep is not None and sub.group_cost * sub.groups == sizes[sub.kind]
        spent += float(sub.keep.sum()) * sub.group_cost / 22
    work = counter.work(0.5)
    assert abs(1.0 - work.saved_routable - spent / (sum(sizes.values()) * len(layout.layers))) < 1e-9
    set_budget(model, 0.2)
    logits_of(model, ids)
    less = width.counter()
    less.add(None, (2, 11))
    assert less.work(0.2).saved_routable > work.saved_routable + 0.1


CHECKS: dict[str, Callable[[str], None]] = {
    "dense": check_dense,
    "masks": check_masks,
    "padding": check_padding,
    "cache": check_cache,
    "beams": check_beams,
    "saving": check_saving,
    "detach": check_detach,
    "gradients": check_gradients,
    "training": check_training,
    "calibration": check_calibration,
    "work": check_work,
}
"""Name of a promise -> the check that proves it of a model in tiny.CONTRACT."""
