"""Plain decoding by name, and `exact=True`: what it refuses, before any forward, and ids that equal bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig

import drafters
import zoo
from hf_specdec import (
    InvalidConfigError,
    SpeculativeConfig,
    SpeculativeDecodingError,
    SpeculativeGenerationMixin,
    UnsupportedGenerationError,
)
from hf_specdec.cpu import library
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.generation import checks, mixin
from hf_specdec.verification import tree_attention
from hf_specdec.verification.model import CACHE_FIELD
from models import prompts

PLAIN = {"method": "plain"}
EXACT = {"exact": True}
SAMPLED = {"do_sample": True, "top_k": 8, "temperature": 0.7}
TRAINING_FREE = ("auto", "hybrid", "prompt_lookup", "token_recycling", "last_logits", "lookahead", "early_exit")
WITH_HEADS = ("never", "sometimes", "eagle", "eagle_static", "eagle3", "medusa", "mtp", "draft_model")


def attached(name: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    return SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build(name)).to(dtype))


def generate(model: Any, rows: int, speculative: Any, **options: Any) -> list[list[int]]:
    ids, mask = prompts(rows)
    torch.manual_seed(4)
    given = {"max_new_tokens": 40, "do_sample": False, "attention_mask": mask, **options}
    found: list[list[int]] = model.generate(ids, speculative=speculative, **given).tolist()
    return found


# ------------------------------------------------------------------------------------------- plain decoding by name


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_plain_decoding_has_a_name(llama: Any, rows: int, options: dict[str, Any]) -> None:
    if rows > 1 and options:
        pytest.skip("rows of a batch draw in another order")
    assert generate(llama, rows, "plain", **options) == generate(llama, rows, None, **options)
    stats = llama.last_speculation
    assert stats.method == "plain"
    assert (stats.num_drafted_tokens, stats.mean_accepted_length) == (0, 1.0)
    assert stats.num_target_forwards == 39
    assert generate(llama, rows, {"method": "prompt_lookup", "num_draft_tokens": 1}, **options) == generate(
        llama, rows, SpeculativeConfig("plain"), **options
    )


@pytest.mark.parametrize("name", ["gpt2", "qwen3_next", "gemma3_text"])
def test_plain_decoding_of_other_models(name: str) -> None:
    """Another layout of products, a recurrent state, windows."""
    model = attached(name)
    assert generate(model, 1, "plain") == generate(model, 1, None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({name: value}, rf"'plain' does not take {name}=.* because its tree follows from plain decoding")
          for name, value in (("num_steps", 3), ("num_draft_tokens", 8), ("top_k", 2), ("tree", "static"),
                              ("tree", [(0,)]))),
        ({"eagle_topk": 2}, "'plain' does not take top_k=2"),
        ({"adaptive": True}, "`adaptive` chooses the size of trees, and 'plain' drafts none"),
        ({"draft_window": 8}, "`draft_window` applies to EAGLE"),
        ({"history": True}, "`history` must be None"),
        ({"methods": ["prompt_lookup"]}, "`methods` must be None"),
        ({"method": "hybrid", "methods": ["plain", "prompt_lookup"]}, "single methods that draft, got .'plain'"),
        ({"acceptance": "block"}, "cannot be combined with do_sample=False"),
    ],
)  # fmt: skip
def test_plain_decoding_takes_no_sizes(
    llama: Any, fields: dict[str, Any], message: str, nothing_runs: Callable[[], None]
) -> None:
    nothing_runs()
    with pytest.raises((InvalidConfigError, UnsupportedGenerationError), match=message):
        generate(llama, 1, {**PLAIN, **fields})


def test_no_drafter_is_called_plain(llama: Any) -> None:
    with pytest.raises(InvalidConfigError, match="already a method 'plain'"):
        llama.add_drafter(drafters.oracle("never")(llama, torch.empty(0, 0), 0), "plain")
    with pytest.raises(UnsupportedGenerationError, match="`assistant_model` has no effect with speculative='plain'"):
        generate(llama, 1, "plain", assistant_model=drafters.noisy("llama"))


# ------------------------------------------------------------------------------------------- what is refused


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """What makes forwards of models, and the decoding loop, fail from then on."""

    def fail(*_args: Any) -> None:
        raise AssertionError("something ran")

    def begin() -> None:
        monkeypatch.setattr(nn.functional, "linear", fail)
        monkeypatch.setattr(mixin, "decode", fail)

    return begin


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({"compile": mode}, r"whose sums depend on .* Use compile=\"auto\", \"kernels\" on a CPU or \"cuda_graph\"")
          for mode in (False, "none", True, "inductor", "compile")),
        *(({"acceptance": rule}, f"acceptance='{rule}', which gives other tokens")
          for rule in ("typical", "nucleus")),
        ({"exact": 1}, "`exact` must be True or False"),
        ({"exact": None}, "`exact` must be True or False"),
    ],
)  # fmt: skip
def test_fields_that_exclude_exactness(
    llama: Any, fields: dict[str, Any], message: str, nothing_runs: Callable[[], None]
) -> None:
    nothing_runs()
    with pytest.raises(InvalidConfigError, match=message):
        generate(llama, 1, {**PLAIN, **EXACT, **fields}, do_sample=fields.get("acceptance") == "block")


@pytest.mark.parametrize("fields", [{}, {"compile": "kernels"}, {"compile": "cuda_graph"}, {"acceptance": "greedy"}])
def test_fields_that_exactness_takes(fields: dict[str, Any]) -> None:
    config = SpeculativeConfig(**EXACT, **fields)
    assert config.to_dict()["exact"]
    assert SpeculativeConfig.from_dict(config.to_dict()) == config
    assert "exact" not in SpeculativeConfig().to_dict()


@pytest.fixture(scope="module")
def exact_llama() -> Any:
    model = attached(dtype=torch.bfloat16)
    generate(model, 1, {**PLAIN, **EXACT}, max_new_tokens=2)  # the program is made
    return model


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "hidden states": ({}, {"return_dict_in_generate": True, "output_hidden_states": True}, "attentions of all layers"),
    "a cache": ({}, {CACHE_FIELD: "filled"}, f"cannot continue the 3 tokens of `{CACHE_FIELD}`"),
    "embeddings": ({}, {"inputs_embeds": "of ids"}, "which read token ids, got `inputs_embeds`"),
    "sections": (
        {},
        {"position_ids": torch.arange(21).expand(3, 1, -1)},
        "one position per token; this model has several",
    ),
    "autocast": ({}, {}, r"do not run under autocast\. Call generate\(\) outside"),
    "several processes": ({}, {"synced_gpus": True}, "`synced_gpus`"),
    "graphs on a CPU": ({"compile": "cuda_graph"}, {}, "needs a GPU"),
    "sampled drafts": ({"method": "draft_model"}, SAMPLED, "with drafts of 'draft_model', which are sampled"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_cannot_be_exact_is_refused_before_any_forward(
    exact_llama: Any, name: str, nothing_runs: Callable[[], None]
) -> None:
    fields, options, message = CALLS[name]
    model, (ids, mask) = exact_llama, prompts(1)
    options = {"max_new_tokens": 4, "attention_mask": mask, **options}
    if name == "sampled drafts":
        assistant = drafters.noisy("llama").to(torch.bfloat16)
        model.add_drafter(DraftModelDrafter(assistant, sample=True), "draft_model")
    if CACHE_FIELD in options:
        options[CACHE_FIELD] = cache = DynamicCache(config=model.config)
        model(ids[:, :3], None, None, cache)
    if "inputs_embeds" in options:
        options["inputs_embeds"], ids = model.get_input_embeddings()(ids), None
    entered = torch.autocast("cpu", torch.bfloat16) if name == "autocast" else nullcontext()
    nothing_runs()
    with entered, pytest.raises(SpeculativeDecodingError, match=message):
        model.generate(ids, speculative={"method": "prompt_lookup", **EXACT, **fields}, **options)


def test_model_inputs_that_programs_do_not_have_are_refused(exact_llama: Any) -> None:
    inputs = {"token_type_ids": torch.zeros(1, 21, dtype=torch.long), "attention_mask": prompts(1)[1]}
    facts = exact_llama._speculation.facts[0]
    checks.check_inputs(SpeculativeConfig(), GenerationConfig(), inputs, facts, 1, 1, 30)
    with pytest.raises(UnsupportedGenerationError, match="do not take the model inputs token_type_ids"):
        checks.check_inputs(SpeculativeConfig(exact=True), GenerationConfig(), inputs, facts, 1, 1, 30)


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("llama", torch.float16, "are CPU kernels, and there are none for float16. Load the model with"),
        ("bloom", torch.float32, "BloomForCausalLM has none that is exact: it verifies chains"),
        ("lfm2", torch.float32, "Lfm2ForCausalLM has none that is exact: its recurrent layers read prompts in chunks"),
        ("gpt2", torch.float32, r"GPT2LMHeadModel has none that is exact: torch computes aten::addmm of it"),
        ("gpt_neox", torch.bfloat16, r"has none that is exact: torch computes aten::gelu of it"),
        ("mixtral", torch.float32, r"MixtralForCausalLM has none that is exact: it cannot be traced|computes aten::"),
    ],
)
def test_a_model_that_cannot_be_exact_is_refused(name: str, dtype: torch.dtype, message: str) -> None:
    model = attached(name, dtype)
    for _ in range(2):  # the second time it is known
        with pytest.raises(UnsupportedGenerationError, match=message):
            generate(model, 1, {**PLAIN, **EXACT})


def test_without_kernels_exactness_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = attached()
    monkeypatch.setenv(library.VARIABLE, "none")
    monkeypatch.setattr(library, "_loaded", [])
    with pytest.raises(UnsupportedGenerationError, match="HF_SPECDEC_KERNELS is 'none'"):
        generate(model, 1, {**PLAIN, **EXACT})
    with pytest.raises(UnsupportedGenerationError, match="HF_SPECDEC_KERNELS is 'none'"):
        model.warmup({**PLAIN, **EXACT})


@pytest.mark.slow
def test_attention_by_torch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = attached()
    monkeypatch.setattr(tree_attention, "kernel_can_use", lambda *_: False)
    monkeypatch.setattr("hf_specdec.verification.runners.kernel_can_use", lambda *_: False)
    with pytest.raises(UnsupportedGenerationError, match="torch computes its attention"):
        generate(model, 1, {**PLAIN, **EXACT})


# ------------------------------------------------------------------------------------------- what is kept


MODELS = [(name, dtype) for name in ("llama", "gemma3_text", "qwen2") for dtype in (torch.bfloat16, torch.float32)]


@pytest.fixture(
    scope="module",
    params=[pytest.param(one, id=str(one), marks=[pytest.mark.slow] if one != MODELS[0] else []) for one in MODELS],
)
def model(request: pytest.FixtureRequest) -> Any:
    """Groups of query heads; sliding windows and other norms; biases."""
    return attached(*request.param)


def alone(model: Any, rows: int, row: int, speculative: Any) -> list[int]:
    """The answer to one prompt of a batch, without its neighbours and its padding."""
    ids, mask = prompts(rows)
    kept = mask[row].bool()
    found: Tensor = model.generate(
        ids[row : row + 1, kept], attention_mask=mask[row : row + 1, kept], max_new_tokens=40, do_sample=False,
        speculative=speculative,
    )  # fmt: skip
    answer: list[int] = found[0, int(kept.sum()) :].tolist()
    return answer


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("name", [*TRAINING_FREE, *WITH_HEADS])
def test_greedy_ids_are_those_of_plain_decoding(model: Any, name: str, rows: int) -> None:
    plain = generate(model, rows, {**PLAIN, **EXACT})
    assert model.last_speculation.forwards == "kernels"
    config: dict[str, Any] = {"method": name}
    if name in drafters.BY_NAME:
        config = drafters.BY_NAME[name].add(model, torch.tensor(plain)[:, 21:])
    for fields in ({}, {"num_draft_tokens": 24}) if name in ("auto", "token_recycling") else ({},):
        assert generate(model, rows, {**config, **EXACT, **fields}) == plain
        assert model.last_speculation.forwards == "kernels"
    if rows > 1 and name in ("auto", "token_recycling"):
        found = generate(model, rows, {**config, **EXACT})
        assert [alone(model, rows, row, {**PLAIN, **EXACT}) for row in range(rows)] == [row[21:] for row in found]


@pytest.mark.parametrize("name", [*TRAINING_FREE, "eagle", "draft_model"])
def test_sampled_ids_are_those_of_plain_decoding(model: Any, name: str) -> None:
    plain = generate(model, 1, {**PLAIN, **EXACT}, **SAMPLED)
    config: dict[str, Any] = {"method": name}
    if name in drafters.BY_NAME:
        config = drafters.BY_NAME[name].add(model)
    assert generate(model, 1, {**config, **EXACT}, **SAMPLED) == plain
    if name == "draft_model":
        model.remove_drafter(name)
        assistant = drafters.assistant_for(model, 0)
        config = {"method": name, "num_steps": 3, **EXACT}
        assert generate(model, 1, config, assistant_model=assistant, **SAMPLED) == plain


@pytest.mark.slow
def test_a_first_exact_call_runs_the_kernels_and_what_others_do_not_change_them(llama: Any) -> None:
    plain = generate(llama, 2, {**PLAIN, **EXACT})
    assert llama.last_speculation.forwards == "kernels"
    assert generate(llama, 2, {**PLAIN, "compile": "kernels"}) == plain
    assert generate(llama, 2, {**PLAIN, **EXACT}, prefill_chunk_size=5) == plain
    assert generate(llama, 2, {**PLAIN, **EXACT}, **{CACHE_FIELD: DynamicCache(config=llama.config)}) == plain


@pytest.mark.slow
def test_the_page_is_true(exact_llama: Any, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "exactness.md").read_text()
    ids, mask = prompts(1)
    scope = {"model": exact_llama, "inputs": {"input_ids": ids, "attention_mask": mask}}
    exec(page.split("<!-- exact -->\n```python\n", 1)[1].split("```", 1)[0], scope)
    assert capsys.readouterr().out == "tensor(True)\n"
