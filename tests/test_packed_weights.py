"""Weights in GGUF blocks: their layout for the kernels, products, and models that are made of them."""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from drafters import random_block, random_head
from hf_specdec import SpeculativeGenerationMixin
from hf_specdec.cpu import operations
from hf_specdec.cpu.operations import BLOCKS
from hf_specdec.cpu.quantized import PackedWeight, packed_like, stored_weight
from hf_specdec.errors import InvalidConfigError, UnsupportedModelError
from hf_specdec.training import Conversation, capture_features
from hf_specdec.verification.model import lm_head_rows

gguf = pytest.importorskip("gguf")
DTYPES = [torch.float32, torch.bfloat16]
SCALES = {"Q4_0": 0.02, "Q5_0": 0.01, "Q8_0": 0.001, "Q4_K": 0.0004, "Q6_K": 0.00006}


def random_blocks(kind: str, rows: int, size: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Any bytes are numbers of a block; its 16-bit scales must not be infinite. Some are too small to be normal."""
    generator, block = np.random.default_rng(seed), BLOCKS[kind]
    raw = generator.integers(0, 256, (rows, size // block.numbers, block.in_file), dtype=np.uint8)
    for place, scale in {"Q6_K": [(208, 1)], "Q4_K": [(0, 1), (2, 7)]}.get(kind, [(0, 1)]):
        drawn = generator.random(raw.shape[:2]) * SCALES[kind] * scale * np.sign(generator.random(raw.shape[:2]) - 0.1)
        raw[:, :, place : place + 2] = drawn.astype(np.float16)[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def packed(kind: str, rows: int, size: int, dtype: torch.dtype, round_activations: bool = False) -> PackedWeight:
    blocks = torch.from_numpy(random_blocks(kind, rows, size))
    return PackedWeight.from_gguf(blocks, kind, dtype, round_activations)


def multiply(x: Tensor, weight: PackedWeight, **options: Any) -> Tensor:
    stored = stored_weight(weight)
    assert stored is not None
    return operations.linear(x, [stored.numbers], [None], form=stored.form, **options)


def rounded_rows(x: Tensor) -> Tensor:
    """32 numbers at a time in int8, as llama.cpp's Q8_0."""
    groups = x.float().view(len(x), -1, 32)
    largest = groups.abs().amax(-1, keepdim=True)
    return ((groups * (127 / largest)).round().double() * (largest / 127)).view(len(x), -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", BLOCKS)
def test_products_and_rows(kind: str, dtype: torch.dtype) -> None:
    """Rows equal those of gguf's own package; products those of these rows; a row's bits depend on no other row."""
    for rows, size in ((16, 256), (144, 1536), (2064, 512)):
        weight = packed(kind, rows, size, dtype)
        numbers = gguf.quants.dequantize(random_blocks(kind, rows, size), gguf.GGMLQuantizationType[kind])
        wide = torch.from_numpy(numbers.astype(np.float32))
        assert weight.shape == (rows, size)
        assert weight.dtype == dtype
        assert torch.equal(weight.dequantize(), wide.to(dtype))
        ids = torch.randint(rows, (2, 3), generator=torch.Generator().manual_seed(0))
        assert torch.equal(functional.embedding(ids, weight), wide.to(dtype)[ids])
        assert torch.equal(weight[ids[0]], wide.to(dtype)[ids[0]])
        x = torch.randn(270, size, generator=torch.Generator().manual_seed(1)).to(dtype)
        x[3, 32:64] = 0
        x[4, :32] *= 1e3
        for is_rounded, given in ((False, x.double()), (True, rounded_rows(x).nan_to_num())):
            used = packed(kind, rows, size, dtype, is_rounded)
            found, expected = multiply(x, used), given @ wide.double().T
            # a number between two integers may be rounded to the other one
            most = 5e-3 if dtype == torch.bfloat16 else 3e-4 if is_rounded else 1e-6
            assert float((found.double() - expected).norm() / expected.norm()) < most
            for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 269):
                assert torch.equal(multiply(x[:count], used), found[:count])
            threads = torch.get_num_threads()
            try:
                torch.set_num_threads(3)
                assert torch.equal(multiply(x, used), found)
            finally:
                torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("byte", [0, 255])
def test_the_largest_sums(kind: str, byte: int) -> None:
    """All numbers of the weights are the least or the largest, and rows are rounded to 127 or -127."""
    block = BLOCKS[kind]
    blocks = random_blocks(kind, 16, 512).reshape(16, -1, block.in_file)
    blocks[:, :, {"Q4_K": slice(16, None), "Q6_K": slice(192)}.get(kind, slice(2, None))] = byte
    wide = torch.from_numpy(gguf.quants.dequantize(blocks.reshape(16, -1), gguf.GGMLQuantizationType[kind]))
    weight = PackedWeight.from_gguf(torch.from_numpy(blocks.reshape(16, -1)), kind, torch.float32, True)
    x = torch.ones(8, 512)
    x[1::2] = -1
    x[2:, 0::4] *= -1
    x[4:, 2::4] *= -1
    found, expected = multiply(x, weight), x.double() @ wide.double().T
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", BLOCKS)
def test_rounded_rows_that_are_no_numbers(kind: str) -> None:
    weight, x = packed(kind, 16, 256, torch.float32, round_activations=True), torch.ones(4, 256)
    x[0, 5], x[1, 9], x[2] = torch.nan, torch.inf, 1e-38
    found = multiply(x, weight)
    assert found[:2].isnan().all()
    assert torch.equal(found[2], torch.zeros(16))
    assert torch.equal(found[3:], multiply(x[3:], weight))


def test_what_torch_does_with_one() -> None:
    weight = nn.Parameter(packed("Q4_K", 32, 512, torch.float32), requires_grad=False)
    wide, x = weight.dequantize(), torch.randn(2, 512)
    assert isinstance(weight, PackedWeight)
    assert "Q4_K" in repr(weight.data)
    assert weight.nbytes == weight.data.nbytes == 32 * 2 * BLOCKS["Q4_K"].here
    for kept in (weight.detach(), copy.deepcopy(weight), weight.to("cpu"), weight.clone()):
        assert isinstance(kept, PackedWeight)
        assert torch.equal(kept.dequantize(), wide)
    half = weight.to(torch.bfloat16)
    assert isinstance(half, PackedWeight)
    assert torch.equal(half.dequantize(), wide.bfloat16())
    assert torch.equal(weight[3:5], wide[3:5])
    assert torch.equal(weight + 1, wide + 1)
    assert type(weight.to(torch.float64)) is Tensor
    assert torch.equal(weight.to(torch.float64), wide.double())
    assert torch.equal(x @ weight.T, x @ wide.T)
    learned = x.clone().requires_grad_()
    functional.linear(learned, weight).sum().backward()
    assert torch.allclose(learned.grad, wide.sum(0).expand(2, -1), atol=1e-4)
    assert torch.equal(functional.linear(input=x, weight=weight), functional.linear(x, weight))
    assert torch.equal(weight[torch.tensor([-1, 2])], wide[[-1, 2]])
    for wrong in (torch.randn(2, 256), torch.randn(2, 512, dtype=torch.float64)):
        with pytest.raises(RuntimeError):
            functional.linear(wrong, weight)
    renormalise = lambda: functional.embedding(torch.tensor([3]), weight, max_norm=1.0)  # noqa: E731
    for write in (
        renormalise,
        lambda: weight.mul_(2),
        lambda: weight.__setitem__(0, 0.0),
        lambda: weight.data.copy_(wide),
    ):
        with pytest.raises(UnsupportedModelError, match="written"):
            write()
    with pytest.raises(IndexError, match="from 0 to 31"):
        functional.embedding(torch.tensor([32]), weight)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_done_with_one(tmp_path: Path) -> None:
    """Nothing becomes a tensor of full size unnoticed."""
    model = packed_model("llama", torch.float32, round_activations=False)
    ids = torch.tensor([[5, 6, 7]])
    before = model(ids).logits
    for refused in (
        lambda: model.save_pretrained(tmp_path), lambda: model.to("meta"), model.share_memory, model.half,
        lambda: model.resize_token_embeddings(600),
    ):  # fmt: skip
        with pytest.raises(UnsupportedModelError, match="gguf_file"):
            refused()
    model = packed_model("llama", torch.float32, round_activations=False)
    torch.save(model.state_dict(), tmp_path / "weights")
    state = torch.load(tmp_path / "weights", weights_only=False)
    assert torch.equal(state["lm_head.weight"].dequantize(), model.lm_head.weight.dequantize())
    tuned = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=["q_proj"]))
    torch.testing.assert_close(tuned(ids).logits, before)
    assert copy.deepcopy(model).to(torch.bfloat16)(ids).logits.dtype == torch.bfloat16
    untied = packed_model("qwen3", torch.float32, round_activations=False)
    with torch.no_grad():
        assert torch.equal(torch.compile(untied, backend="eager")(ids).logits, untied(ids).logits)


def test_which_weights_stay_packed() -> None:
    assert all(PackedWeight.supports(kind, 48, 256) for kind in BLOCKS)
    assert not PackedWeight.supports("Q4_1", 48, 256)
    assert not PackedWeight.supports("Q8_0", 49155, 256)
    assert not PackedWeight.supports("Q4_K", 48, 96)
    assert PackedWeight.supports("Q8_0", 48, 96)


def test_features_of_another_way_to_multiply_are_refused(tmp_path: Path) -> None:
    talks = [Conversation.of([5, 6], [7, 8, 9])]
    for rounds, told in ((False, ""), (False, ""), (True, "of another target")):
        with pytest.raises(InvalidConfigError, match=told) if told else nullcontext():
            capture_features(packed_model("llama", torch.float32, rounds), talks, tmp_path)


def packed_model(family: str, dtype: torch.dtype, round_activations: bool) -> Any:
    """Kinds differ between layers, and between products of one input."""
    torch.manual_seed(0)
    sizes: Any = {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 64,
        "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": family == "llama", "eos_token_id": None,
        "bos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    model: Any = (
        LlamaForCausalLM(LlamaConfig(**sizes)) if family == "llama" else Qwen3ForCausalLM(Qwen3Config(**sizes))
    )
    model = model.to(dtype).eval()
    kinds = itertools.cycle(BLOCKS)
    of_name: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) and not (name == "lm_head" and family == "llama"):
            kind = of_name.setdefault(name.replace("up_", "gate_").replace("k_", "q_"), next(kinds))
            weight = packed(kind, *module.weight.shape, dtype, round_activations)
            module.weight = nn.Parameter(weight, requires_grad=False)
    model.tie_weights()
    return SpeculativeGenerationMixin.attach(model)


@pytest.mark.slow
@pytest.mark.parametrize("round_activations", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_models(family: str, dtype: torch.dtype, round_activations: bool) -> None:
    """Trees answer what plain steps do with the kernels, and also what `generate()` does, unless rounding differs."""
    model = packed_model(family, dtype, round_activations)
    ids = torch.randint(3, 500, (2, 20), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 24, "do_sample": False}
    own = model.generate(ids, **options)
    plain = model.generate(ids, speculative={"method": "plain", "compile": "kernels"}, **options)
    runner = model._speculation.programs["kernels"].runner
    assert runner.reads_prompts
    assert not runner.inexact
    if dtype == torch.float32:
        assert torch.equal(plain, own) or round_activations
        assert torch.equal(model.generate(ids, speculative="auto", **options), own)
    for method in ("prompt_lookup", "token_recycling", "auto"):
        config = {"method": method, "compile": "kernels", "exact": True}
        assert torch.equal(model.generate(ids, speculative=config, **options), plain)


@pytest.mark.parametrize("round_activations", [False, True])
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "block", "block of few tokens"])
def test_drafts_of_a_packed_target_read_blocks_of_the_head(kind: str, round_activations: bool) -> None:
    """The head stays as it was, and its copy is as close to it as 8 bits are; answers are those of plain steps."""
    model = packed_model("llama", torch.bfloat16, round_activations)
    head: Any = {
        "eagle": lambda: random_head(model),
        "eagle3": lambda: random_head(model, version=3, draft_vocab_size=None),
        "block": lambda: random_block(model, markov_rank=32, draft_vocab_size=None),
        "block of few tokens": lambda: random_block(model, markov_rank=32, draft_vocab_size=96),
    }[kind]().bfloat16()
    kept = copy.deepcopy(head.state_dict())
    copied = packed_like(head, model)
    for (name, weight), other in zip(head.named_parameters(), copied.parameters(), strict=True):
        if weight.dim() == 1 or "markov_w1" in name:  # an embedding
            assert other is weight
            continue
        assert stored_weight(other).form == operations.PACKED + 4 + round_activations, name
        wide, step = weight.float(), weight.float().unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
        distance = (other.dequantize().float() - wide).unflatten(1, (-1, 32)).abs()
        assert bool((distance <= 0.51 * step + 0.004 * wide.unflatten(1, (-1, 32)).abs()).all()), name
    model.load_drafter(head, name="head", verify=False)
    hidden = torch.randn(1, 8, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    lm_head = lm_head_rows(model, head.hot_token_ids) if head.shares_lm_head else None
    if head.shares_lm_head and head.hot_token_ids is not None:  # neither all rows of the target's, nor unpacked ones
        rows = model.lm_head.weight.dequantize()[head.hot_token_ids]
        assert torch.equal(lm_head.weight, rows)
        lm_head = packed_like(lm_head, model)
        assert stored_weight(lm_head.weight).form == operations.PACKED + 4 + round_activations
    own, packed_scores = (one.score(hidden, lm_head).float() for one in (head, packed_like(head, model)))
    compiled = model.drafters["head"].compiled(model, "kernels").program.stages.score(hidden).float()
    assert torch.equal(compiled, packed_scores)
    if not head.shares_lm_head:
        assert 0 < float((compiled - own).norm() / own.norm()) < 0.03
    ids = torch.randint(3, 500, (1, 20), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 16, "do_sample": False}
    plain = model.generate(ids, speculative={"method": "plain", "compile": "kernels"}, **options)
    settings = {"method": "head", "compile": "kernels", "exact": True}
    assert torch.equal(model.generate(ids, speculative=settings, **options), plain)
    assert all(torch.equal(kept[name], weight) for name, weight in head.state_dict().items())


def test_zeros_in_blocks_and_a_target_that_is_not_packed() -> None:
    model, layer = packed_model("llama", torch.float32, False), nn.Linear(64, 16, bias=False)
    with torch.no_grad():
        layer.weight[:8] = 0.0
        layer.weight[0, 0] = 1e-9
    copied = packed_like(nn.ModuleList([layer, nn.Linear(48, 16)]), model)
    assert torch.equal(copied[0].weight.dequantize()[:8], torch.zeros(8, 64))
    assert type(copied[1].weight) is nn.Parameter
    assert packed_like(layer, nn.Linear(2, 2)) is layer
    assert packed_like(None, model) is None
