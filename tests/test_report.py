"""The report: its numbers against an independent count, its page against its JSON, and what it refuses."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from routing_helpers import oracle_logits, route
from tiny import tiny_model, tiny_tokenizer
from widellm.cli.main import app
from widellm.errors import MissingDependencyError, TextError, WidellmError
from widellm.modeling.attach import set_budget
from widellm.modeling.checkpoint import save
from widellm.optional import available
from widellm.report import page, tokens
from widellm.report.collect import collect
from widellm.report.extras import read_compare
from widellm.report.figures import export_png, figures_for, to_svg
from widellm.report.summary import summary

drawn = pytest.mark.skipif(not available("matplotlib"), reason="drawing figures needs matplotlib")

NASTY = (
    "<script>document.title = 'taken over'</script><img src=x onerror=\"document.title='taken over'\">&amp;</pre> "
    "a word, 12 words;\n\n\tשלום עולם مرحبا \U0001f600\U0001f469\u200d\U0001f52c "
    "\x07\x1b[31m \u202eevil\u202c [bold]x[/bold]"
)


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A routed directory of a tiny model with random routers."""
    folder = tmp_path_factory.mktemp("report") / "routed"
    model = tiny_model()
    route(model)
    save(model, folder, tiny_tokenizer())
    return folder


@pytest.fixture(scope="module")
def nasty(routed: Path) -> Path:
    path = routed.parent / "nasty.txt"
    path.write_text(NASTY, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def files(routed: Path) -> tuple[Path, Path]:
    """A bench file and a file of recipes, with rows that are to be left out, and names that must be escaped."""
    bench = [{"kind": "op", "op": "routed_ffn"}]
    for phase, scale in (("prefill", 10.0), ("decode", 1.0)):
        for engine, budget, speed in (
            ("<b>$own$</b>", 1.0, 80),
            ("<b>$own$</b>", 0.5, 120),
            ("other", None, 84),
        ):
            row = {"kind": "model", "model": "routed", "phase": phase, "engine": engine, "budget": budget}
            bench.append({**row, "tokens_per_s": speed * scale})
    bench.append({**row, "model": "random:llama-1b", "tokens_per_s": 1.0})
    recipes = [
        {"recipe": "one <i>shot</i>", "budget": 0.5, "perplexity": {"mean": 96.0, "std": 2.0}},
        {"recipe": "trained", "budget": 0.5, "perplexity_mean": 67.0, "perplexity_std": 1.5},
        {"recipe": "static", "budget": 0.5, "perplexity": 150.0},
    ]
    paths = (routed.parent / "bench.json", routed.parent / "recipes.json")
    paths[0].write_text(json.dumps(bench))
    paths[1].write_text(json.dumps({"rows": recipes}))
    return paths


@pytest.fixture(scope="module")
def data(routed: Path, nasty: Path, files: tuple[Path, Path]) -> dict[str, Any]:
    torch.manual_seed(0)
    return collect(routed, str(nasty), budget=0.5, bench=files[0], compare=files[1])


@pytest.fixture(scope="module")
def rendered(data: dict[str, Any]) -> str:
    pytest.importorskip("matplotlib")
    return page.render(data)


def test_counts_equal_an_independent_count_of_the_masks(data: dict[str, Any]) -> None:
    model = tiny_model()
    width = route(model)
    ids = torch.tensor([data["tokens"]["ids"]])
    _, keeps = oracle_logits(tiny_model(), width, ids)
    costs = [sub.groups * sub.group_cost for sub in width.sublayers]
    for t in range(ids.shape[1]):
        spent = 0
        for i, (sub, keep) in enumerate(zip(width.sublayers, keeps, strict=True)):
            kept = sum(keep[0, t].tolist())
            assert data["tokens"][sub.kind][t][i // 2] == kept
            spent += kept * sub.group_cost
        assert data["tokens"]["share"][t] == pytest.approx(spent / sum(costs), abs=1e-6)
    same = total = dead = 0
    for row, sub, keep in zip(data["layers"], width.sublayers, keeps, strict=True):
        masks = keep[0].tolist()
        columns = list(zip(*masks, strict=True))
        assert (row["layer"], row["kind"]) == (sub.layer_index, sub.kind)
        assert row["density"] == pytest.approx(sum(map(sum, masks)) / (len(masks) * sub.groups))
        assert row["always"] == sum(all(column) for column in columns)
        assert row["never"] == sum(not any(column) for column in columns)
        assert row["always"] + row["selective"] + row["never"] == sub.groups == len(row["usage"])
        assert row["usage"] == pytest.approx([sum(column) / len(masks) for column in columns], abs=1e-6)
        pairs = [a == b for one, two in zip(masks, masks[1:], strict=False) for a, b in zip(one, two, strict=True)]
        assert row["agreement"] == pytest.approx(sum(pairs) / len(pairs))
        dead += row["never"] * sub.group_cost
        same, total = same + sum(pairs), total + len(pairs)
    assert data["dead"]["weights"] == dead
    saved = 1 - sum(data["tokens"]["share"]) / ids.shape[1]
    assert data["work"]["saved_routable"] == pytest.approx(saved, abs=1e-5)
    for row in data["shared"]:
        size = row["tokens"]
        batches = ids.shape[1] // size
        near = far = 0
        for sub, keep in zip(width.sublayers, keeps, strict=True):
            for b in range(batches):
                near += sub.group_cost * int(keep[0, b * size : (b + 1) * size].any(0).sum())
                far += sub.group_cost * int(keep[0, b : batches * size : batches].any(0).sum())
        assert row["neighbours"] == pytest.approx(near / (sum(costs) * batches))
        assert row["apart"] == pytest.approx(far / (sum(costs) * batches))


def test_the_curve_equals_the_models_own_losses(data: dict[str, Any]) -> None:
    ids = torch.tensor([data["tokens"]["ids"]])
    curve = data["curve"]
    assert len(curve["points"]) >= 8 and (curve["windows"], curve["window"]) == (1, ids.shape[1])
    model = tiny_model()
    route(model)
    for point in curve["points"][::4]:
        set_budget(model, point["budget"])
        with torch.no_grad():
            loss = model(ids, labels=ids).loss
        assert point["perplexity"] == pytest.approx(float(loss.exp()), rel=1e-4)
    dense = curve["points"][0]
    assert (dense["budget"], dense["kl_to_dense"], dense["top1_agreement"]) == (1.0, 0.0, 1.0)
    assert dense["perplexity"] == pytest.approx(curve["dense_perplexity"])


def test_pieces_are_the_text_and_kinds_are_what_they_say(data: dict[str, Any]) -> None:
    assert "".join(data["tokens"]["text"]) == NASTY
    text = "An unbelievable 12, end\n"
    cases = {(0, 2): "whole word", (3, 5): "piece of a rare word", (5, 15): "piece of a rare word", (15, 18): "number"}
    cases |= {(18, 19): "punctuation", (19, 23): "whole word", (23, 24): "white space", (24, 24): "other"}
    assert {span: tokens.kind_of(text, *span) for span in cases} == cases
    assert tokens.kind_of("\U0001f600", 0, 1) == "other"
    assert sum(row["tokens"] for row in data["kinds"]) == sum(row["tokens"] for row in data["positions"])
    assert data["tokens"]["kind"][0] == "first token"


@drawn
def test_numbers_in_the_page_are_the_jsons(data: dict[str, Any], rendered: str) -> None:
    embedded = re.search(r'<script type="application/json" id="data">(.*?)</script>', rendered)
    assert embedded is not None and json.loads(embedded[1]) == json.loads(json.dumps(data))
    titles = re.findall(r'<span role="option"[^>]* title="([\d.]+)%"', rendered)
    assert titles == [f"{100 * share:.1f}" for share in data["tokens"]["share"]]
    tables = {}
    for name, body in re.findall(
        r'<figure class="card[^"]*" id="figure-([^"]+)".*?<tbody>(.*?)</tbody>', rendered, re.DOTALL
    ):
        rows = re.findall(r"<tr>(.*?)</tr>", body)
        tables[name] = [[html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", row)] for row in rows]
    assert list(tables) == [figure.name for figure in figures_for(data)]
    layers = [row for row in data["layers"] if row["kind"] == "ffn"]
    assert [row[2] for row in tables["density"]] == [f"{100 * row['density']:.1f}%" for row in layers]
    points = sorted(data["curve"]["points"], key=lambda p: p["saved_all_layers"])
    assert [row[5] for row in tables["perplexity"]] == [f"{p['perplexity']:.2f}" for p in points]
    assert [row[2] for row in tables["kinds"]] == [f"{100 * row['share']:.1f}%" for row in data["kinds"]]
    assert [float(row[3]) for row in tables["speed"]] == [row["tokens_per_s"] for row in data["bench"]]
    assert ["trained", "0.5", "67.00", "1.50"] in tables["recipes"]
    point = min(data["curve"]["points"], key=lambda p: abs(p["budget"] - 0.5))
    assert f"<b>{100 * point['saved_all_layers']:.1f}%</b>" in rendered
    for sentence in data["findings"].values():
        assert html.escape(sentence) in rendered


@drawn
def test_text_is_shown_and_never_markup(rendered: str) -> None:
    assert rendered.count("<script") == 2, "the data and the page's own script, nothing else"
    assert "<img" not in rendered and "<b>$own" not in rendered and "<i>shot" not in rendered
    assert "\u202e" not in rendered and "\x07" not in rendered and "\x1b" not in rendered
    assert not re.search(r'(src|href)="(?!#|data:)', re.sub(r'xlink:href="data:', 'href="data:', rendered))
    for figure in re.findall(r'<figure class="card.*?</figure>', rendered, re.DOTALL):
        assert re.search(r'role="img" aria-label="[^"]{40,}', figure), "a text alternative"
    ids = re.findall(r'\bid="([^"]+)"', rendered)
    assert len(ids) == len(set(ids))
    assert page.text("a\x00\u2066b<\r\n") == "a[U+0000][U+2066]b&lt;\\r\n"


@drawn
def test_figures_are_drawn_in_the_pages_colours(data: dict[str, Any], tmp_path: Path) -> None:
    for figure in figures_for(data):
        svg = to_svg(figure, data)
        assert "var(--muted)" in svg and "#0102" not in svg and ("<path" in svg)
        assert svg == to_svg(figure, data), "the same numbers give the same figure"
    written = export_png(data, tmp_path / "png")
    assert {p.stem for p in written} == {figure.name for figure in figures_for(data)}
    assert all(p.read_bytes().startswith(b"\x89PNG") and p.stat().st_size > 4000 for p in written)
    with pytest.raises(WidellmError, match="exists"):
        export_png(data, tmp_path / "png")


@drawn
def test_a_thousand_tokens_fit_and_a_long_text_is_cut_with_a_notice(tmp_path: Path) -> None:
    model = tiny_model(num_hidden_layers=30, max_position_embeddings=1200)
    route(model)
    save(model, tmp_path / "deep", tiny_tokenizer())
    long = tmp_path / "long.txt"
    long.write_text("Twenty thousand tokens, more or less. " * 530)
    data = collect(tmp_path / "deep", str(long), budget=0.5)
    assert len(data["tokens"]["ids"]) == 1024 and data["text"]["total_tokens"] == 20140
    assert "20,140 tokens; the first 1,024 are shown" in data["text"]["notice"]
    html_page = page.render(data)
    assert html.escape(data["text"]["notice"]) in html_page
    assert len(html_page.encode()) < 5_000_000


def test_the_terminal_gets_a_summary(data: dict[str, Any]) -> None:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))
    console.print(summary(data))
    text = console.export_text()
    assert "At budget 0.5 the model skips" in text and "punctuation" in text
    assert "trained is best (67.0)" in text


def test_default_text_is_what_calibration_did_not_read(routed: Path, tmp_path: Path) -> None:
    pytest.importorskip("pydoc_data.topics")
    data = collect(routed, budget=0.5, tokens=64)
    assert data["text"]["source"] == "python-docs" and len(data["tokens"]["ids"]) == 64
    assert data["text"]["held_out"] is None, "this checkpoint does not say what it was calibrated on"


def test_the_dense_budget_has_a_report_too(routed: Path, nasty: Path) -> None:
    data = collect(routed, str(nasty), budget=1.0)
    assert set(data["tokens"]["share"]) == {1.0} and data["dead"]["groups"] == 0
    assert "nothing to see" in data["findings"]["headline"]


def _bad(folder: Path, rows: Any) -> Path:
    path = folder / "bad.json"
    path.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    return path


ROW = {"kind": "model", "model": "routed", "phase": "decode", "engine": "e", "budget": 0.5, "tokens_per_s": 9.0}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{**ROW, "model": "other"}], "is of another model"),
        ([{**ROW, "tokens_per_s": float("nan")}], "tokens_per_s must be a number above 0"),
        ([{**ROW, "tokens_per_s": "9"}], "row 0: tokens_per_s"),
        ([{**ROW, "budget": 1.5}], r"budget must be a number in \(0, 1\]"),
        ([{**ROW, "engine": ""}], "engine must be a name"),
        ([{"kind": "op"}], 'no row with kind "model"'),
        ([1], "no list of objects"),
        ({"x": 1}, "no list of objects"),
        ("{", "not valid JSON"),
    ],
)
def test_bad_bench_files_are_one_line(routed: Path, nasty: Path, tmp_path: Path, rows: Any, message: str) -> None:
    with pytest.raises(WidellmError, match=message) as caught:
        collect(routed, str(nasty), budget=0.5, bench=_bad(tmp_path, rows))
    assert "\n" not in str(caught.value)


def test_other_bad_input_is_one_line(routed: Path, nasty: Path, tmp_path: Path) -> None:
    empty, short = tmp_path / "empty.txt", tmp_path / "short.txt"
    empty.write_text(" \n")
    short.write_text("x")
    with pytest.raises(TextError, match="empty"):
        collect(routed, str(empty), budget=0.5)
    with pytest.raises(TextError, match="at least 2"):
        collect(routed, str(short), budget=0.5)
    with pytest.raises(WidellmError, match="--tokens 300 is more than the model's context of 256"):
        collect(routed, str(nasty), budget=0.5, tokens=300)
    with pytest.raises(WidellmError, match="--tokens must be at least 2"):
        collect(routed, str(nasty), budget=0.5, tokens=0)
    with pytest.raises(WidellmError, match="is of another model"):
        rows = [{"model": "other", "recipe": "r", "budget": 0.5, "perplexity": 9.0}]
        collect(routed, str(nasty), budget=0.5, compare=_bad(tmp_path, rows))
    with pytest.raises(WidellmError, match="perplexity must be a number"):
        collect(routed, str(nasty), budget=0.5, compare=_bad(tmp_path, [{"recipe": "r", "budget": 0.5}]))


@drawn
def test_attention_alone_may_be_routed(tmp_path: Path, nasty: Path) -> None:
    """Experts are left whole: the report leaves out what there is none of."""
    model = tiny_model("mixtral")
    route(model)
    save(model, tmp_path / "routed", tiny_tokenizer())
    out, numbers = tmp_path / "r.html", tmp_path / "r.json"
    arguments = ["report", str(tmp_path / "routed"), "--text", str(nasty), "--budget", "0.5", "--out", str(out)]
    result = CliRunner().invoke(app, [*arguments, "--json", str(numbers)])
    assert result.exit_code == 0, result.output
    data = json.loads(numbers.read_text())
    assert set(data["model"]["groups"]) == {"attention"} and "ffn" not in data["tokens"]
    assert {row["kind"] for row in data["layers"]} == {"attention"} and data["work"]["ffn_sparsity"] == 0
    written = out.read_text(encoding="utf-8")
    assert "attention groups kept" in written and "FFN groups kept" not in written and "figure-heat-ffn" not in written
    assert "of the q and o weights" in written


@drawn
def test_the_command_writes_everything_or_nothing(routed: Path, nasty: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    arguments = ["report", str(routed), "--text", str(nasty), "--budget", "0.5"]
    out, figures, numbers = tmp_path / "r.html", tmp_path / "figures", tmp_path / "r.json"
    result = runner.invoke(app, [*arguments, "--out", str(out), "--figures", str(figures), "--json", str(numbers)])
    assert result.exit_code == 0, result.output
    assert page.embedded_json(json.loads(numbers.read_text())) in out.read_text(encoding="utf-8")
    assert (figures / "perplexity.png").is_file()
    for bad in (["--out", str(tmp_path / "none" / "r.html")], ["--out", str(tmp_path)], ["--bench", str(nasty)]):
        before = sorted(tmp_path.iterdir())
        failed = runner.invoke(app, [*arguments, *bad])
        assert isinstance(failed.exception, WidellmError) and "\n" not in str(failed.exception)
        assert sorted(tmp_path.iterdir()) == before


def test_without_matplotlib_it_says_what_to_install(data: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    original = importlib.import_module

    def refuse(name: str, package: str | None = None) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return original(name, package)

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(MissingDependencyError, match=r"widellm\[report\]"):
        page.render(data)


def test_recipes_of_several_seeds_become_one_row(tmp_path: Path) -> None:
    rows = [{"recipe": "wide", "seed": s, "budget": 0.5, "perplexity": 10.0 + 2 * s} for s in range(2)]
    (tmp_path / "results.json").write_text(json.dumps({"plan": {}, "rows": rows}))
    (found,) = read_compare(tmp_path / "results.json", ["any"])
    assert (found["perplexity"], found["std"]) == (11.0, pytest.approx(2**0.5))
