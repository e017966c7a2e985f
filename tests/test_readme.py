"""The README is true: its example runs, its links and files exist, the drafters of the docs work."""

from __future__ import annotations

import importlib.metadata
import inspect
import pydoc
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer

from benchmark_script import code_block
from drafters import noisy, pard_assistant, random_head, random_heads
from hf_specdec import DrafterMismatchError, SpeculativeGenerationMixin, cli
from hf_specdec.drafters import registry
from hf_specdec.generation.decode import decode
from zoo import chat_tokenizer

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
ELSEWHERE = ("medusa/model/", "custom_generate/")
"""Folders of other repositories."""


@pytest.mark.slow
def test_the_example_runs(
    small_model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As printed, from the repository's root; the Hub id stands for the packaged model."""
    monkeypatch.chdir(ROOT)
    for factory in (transformers.AutoTokenizer, transformers.AutoModelForCausalLM):
        load = factory.from_pretrained
        monkeypatch.setattr(
            factory, "from_pretrained", lambda name, load=load, **options: load(small_model_path, **options)
        )
    scope: dict[str, Any] = {}
    exec(code_block(README, "<!-- example -->"), scope)
    printed = capsys.readouterr().out
    shown = README[README.index("<!-- example -->") :].split("```output\n")[1].split("```")[0]
    # the number of forwards depends on the machine; the README wraps the line
    printed, shown = (re.sub(r"^\d+ forwards: ", "", " ".join(text.split())) for text in (printed, shown))
    assert printed == shown
    exec(code_block(README, "<!-- head example -->"), scope)
    assert scope["model"].last_speculation.method == "hybrid"
    assert "eagle" in scope["model"].drafters


@pytest.mark.slow
def test_the_tutorial_runs(
    small_model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every Python block in turn, from the repository's root, with the packaged model; they print what is shown.

    In a line of statistics all numbers may differ: they depend on the machine.
    """
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "tutorial.md").read_text()
    assert page.count("```python\n") > 5
    scope: dict[str, Any] = {}
    for code, shown in re.findall(r"```python\n(.*?)```\n+(?:```(?:text|output)\n(.*?)```)?", page, flags=re.DOTALL):
        exec(code, scope)
        printed = capsys.readouterr().out
        if shown.startswith("SpeculationStats("):
            printed, shown = (re.sub(r"[\d.]+( [\d.]+)*", "0", text) for text in (printed, shown))
        assert printed == shown


@pytest.mark.slow
@pytest.mark.parametrize("page", ["exactness", "generate", "hybrid", "performance", "servers"])
def test_the_guides_run(page: str, small_model_path: Path) -> None:
    """Every Python block of a page that builds on the tutorial, in turn, with the packaged model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(small_model_path, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(small_model_path)
    messages = [{"role": "user", "content": "Name three rivers."}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = SpeculativeGenerationMixin.attach(model)
    scope: dict[str, Any] = {"model": model, "tokenizer": tokenizer, "inputs": inputs, "torch": torch}
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    for code in blocks:
        exec(code, scope)
    if page == "servers":
        text, tokens_per_second = scope["answer"](messages, 24)
        plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert text == tokenizer.decode(plain, skip_special_tokens=True)
        assert tokens_per_second > 0


def test_the_commands_of_the_tutorial_exist() -> None:
    page = (ROOT / "docs" / "tutorial.md").read_text()
    lines = re.findall(r"^hf-specdec (\w+) (.*)$", page, flags=re.MULTILINE)
    assert {"doctor", "bench"} <= {name for name, _ in lines}
    commands: Any = typer.main.get_command(cli.app)
    for name, arguments in lines:
        options = {option for parameter in commands.commands[name].params for option in parameter.opts}
        assert set(re.findall(r"--[\w-]+", arguments)) <= options, name


def test_the_package_page_has_whole_links() -> None:
    """README as the metadata has it: every link leads back to the repository."""
    page = importlib.metadata.metadata("hf-specdec").get_payload()
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert len(links) > 10
    links += (pictures := re.findall(r' (?:src|srcset)="([^"]+)"', page))
    assert len(pictures) >= 4
    assert not [link for link in links if not link.startswith(("https://", "#"))]


def anchors(page: Path) -> set[str]:
    """Anchors of a page, as mkdocs and GitHub make them of its headings, and of its entries of the reference."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = (re.sub(r"[^\w\s-]", "", line.lower()) for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {re.sub(r"\s+", "-", line.strip()) for line in headings} | set(
        re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    for picture in re.findall(r' (?:src|srcset)="([^"]+)"', text):
        assert (page.parent / picture).exists(), picture
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", text):
        if not link.startswith("https://"):
            linked = page.parent / link if link else page
            assert linked.exists(), link
            assert not anchor or linked.suffix != ".md" or anchor in anchors(linked), (link, anchor)
    for name in re.findall(r"`([\w/]+/\w+\.(?:py|sh|md))`", text):
        if not name.startswith(ELSEWHERE):
            assert any((folder / name).exists() for folder in (ROOT, ROOT / "src" / "hf_specdec")), name
    for name in re.findall(r"`(hf_specdec(?:\.\w+)+)`", text):
        assert pydoc.locate(name) is not None, name


def test_the_architecture_shows_the_loop_and_the_packages_as_they_are() -> None:
    house = (ROOT / "docs" / "architecture.md").read_text()
    loop = inspect.getsource(decode)
    shown = [line.split("  #")[0].strip() for line in house.split("```python\n")[1].split("```")[0].splitlines()]
    assert [line for line in shown if line not in loop] == []
    names = re.findall(r"`(\w+\.py|\w+/)`", house[house.index("| package |") :])
    assert len(names) > 15
    assert [name for name in names if not (ROOT / "src" / "hf_specdec" / name).exists()] == []


def test_the_commits_of_the_results_exist() -> None:
    def git(*words: str, given: str = "") -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, input=given, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    if shutil.which("git") is None or git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("no git, or not the whole history")
    page = (ROOT / "docs" / "benchmarks" / "results.md").read_text()
    lines = re.findall(r"(?:^Rows: |\(`).*\bcommits? .*2\d{3}-.*", page, re.MULTILINE)
    commits = re.findall(r"\b[0-9a-f]{7}\b", " ".join(lines))
    assert len(commits) > 10
    kinds = git("cat-file", "--batch-check", given="\n".join(commits)).splitlines()
    assert len(kinds) == len(commits)
    assert [line for line in kinds if " commit " not in line] == []


@pytest.mark.slow
def test_the_drafters_of_the_docs_work(llama: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "drafters.md").read_text()
    ids = torch.tensor([[5, 6, 7] * 3, [9, 8, 9] * 3])
    options = {"max_new_tokens": 30, "do_sample": False}
    plain = llama.generate(ids, **options)
    scope: dict[str, Any] = {"model": llama, "inputs": {"input_ids": ids}}
    with pytest.raises(DrafterMismatchError) as caught:
        llama.generate(ids, speculative="eagle")
    assert str(caught.value) in (ROOT / "docs" / "reference" / "generating.md").read_text()
    methods = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "methods").glob("*.md")))
    exec(code_block(page, "# Write your own"), scope)
    assert torch.equal(plain, llama.generate(ids, speculative="bigram", **options))
    assert llama.last_speculation.method == "bigram"
    assert llama.last_speculation.num_drafted_tokens > 0
    monkeypatch.chdir(tmp_path)
    random_head(llama).save_pretrained(tmp_path / "heads" / "smollm2-135m-instruct-eagle3")
    random_heads(llama).save_pretrained(tmp_path / "heads" / "smollm2-135m-instruct-medusa")
    for name in ("prompt_lookup", "token_recycling", "last_logits", "lookahead", "early_exit", "eagle", "medusa"):
        exec(code_block(methods, f"<!-- {name.replace('_', ' ')} -->"), scope)
        assert torch.equal(plain, llama.generate(ids, speculative=name, **options))
    scope["assistant"] = noisy("llama")
    pard_assistant("llama").save_pretrained(tmp_path / "amd" / "PARD-Llama-3.2-1B")
    for name in ("draft_model", "pard"):
        exec(code_block(methods, f"<!-- {name.replace('_', ' ')} -->"), scope)
        assert llama.last_speculation.method == name
    llama.remove_drafter("bigram")
    monkeypatch.setattr(registry, "_METHODS", dict(registry.methods()))
    exec(code_block(page, "## A method by name"), scope)
    assert torch.equal(plain, llama.generate(ids, speculative="bigram", **options))


def test_the_stream_of_a_server(llama: Any) -> None:
    """Its text is plain `generate()`'s; an error reaches its reader; a reader who stops ends the call."""
    tokenizer = chat_tokenizer()
    scope: dict[str, Any] = {"model": llama, "tokenizer": tokenizer, "threading": threading, "torch": torch}
    scope["lock"] = threading.Lock()
    exec(code_block((ROOT / "docs" / "servers.md").read_text(), "<!-- stream -->"), scope)
    asked = [{"role": "user", "content": "w05 w06 w07"}]
    inputs = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    plain = llama.generate(**inputs, max_new_tokens=40, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    answer = "".join(scope["stream"](asked, 40))
    assert answer == tokenizer.decode(plain, skip_special_tokens=True)
    assert answer
    with pytest.raises(ValueError, match="max_new_tokens"):
        list(scope["stream"](asked, -1))
    stream = scope["stream"](asked, 10**6)
    next(stream)
    stream.close()
    assert scope["lock"].acquire(timeout=20), "the call goes on without a reader"


def test_every_method_has_a_section() -> None:
    """On a page of `docs/methods`; it begins with `speculative="name"`."""
    sections: dict[str, str] = {}
    for page in (ROOT / "docs" / "methods").glob("*.md"):
        parts = re.split(r'^`speculative="(\w+)"`', page.read_text(), flags=re.MULTILINE)
        found = dict(zip(parts[1::2], parts[2::2], strict=True))
        sections |= found
        for name, text in found.items():
            headings = {line.lstrip("#") for line in text.splitlines() if line.startswith("##")}
            whole = {" How it drafts", " Settings", " When it pays"} <= headings
            assert whole or (page.stem == "experimental" and "Defaults: " in text), name
            assert "](https://" in text, name
    assert sections.keys() == set(registry.methods()) - {"hybrid", "auto"}
