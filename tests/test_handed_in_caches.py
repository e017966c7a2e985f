"""Caches handed to `generate()`: continued as plain generate does, or refused before any work."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, StaticCache

import zoo
from hf_specdec import SpeculativeGenerationMixin
from hf_specdec.errors import UnsupportedGenerationError
from hf_specdec.verification.model import CACHE_FIELD
from hf_specdec.verification.tree_target import TreeTarget

ROWS, LENGTH = 2, 6
IDS = torch.randint(3, zoo.VOCAB_SIZE, (ROWS, 12), generator=torch.Generator().manual_seed(0))
OPTIONS: dict[str, Any] = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 6, "do_sample": False}


def filled(rows: int = ROWS, length: int = LENGTH) -> DynamicCache:
    """The tiny Llama's, of the first tokens of the prompts."""
    model: Any = zoo.build("llama")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=IDS[:1, :length].expand(rows, -1), **{CACHE_FIELD: cache}, use_cache=True)
    return cache


def changed(change: Callable[[torch.Tensor], torch.Tensor], layers: slice = slice(None)) -> Callable[[], Cache]:
    """A cache whose layers' keys and values are changed."""

    def make() -> Cache:
        cache = filled()
        for layer in cache.layers[layers]:
            layer.keys, layer.values = change(layer.keys), change(layer.values)
        return cache

    return make


def of_layers(change: Callable[[list[Any]], list[Any]]) -> Callable[[], Cache]:
    def make() -> Cache:
        cache = filled()
        cache.layers = change(cache.layers)
        return cache

    return make


def prepared(dtype: torch.dtype, rows: int = ROWS) -> StaticCache:
    cache = StaticCache(config=zoo.build("llama").config, max_cache_len=64)
    cache.early_initialization(batch_size=rows, num_heads=2, head_dim=8, dtype=dtype, device="cpu")
    return cache


def values_in_half() -> Cache:
    cache = filled()
    for layer in cache.layers:
        layer.values = layer.values.half()
    return cache


def offloaded() -> Cache:
    """Its own way to become so makes a stream of a device."""
    cache = filled()
    cache.offloading = True
    return cache


CACHES: dict[str, tuple[Callable[[], Any], str]] = {
    "a tuple": (lambda: ((torch.zeros(ROWS, 2, LENGTH, 8),) * 2,) * 4, "got tuple"),
    "an empty tuple": (lambda: (), "got tuple"),
    "a string": (lambda: "dynamic", "got str"),
    "a list": (lambda: [filled()], "got list"),
    "a dict": (lambda: {}, "got dict"),
    "a number": (lambda: 7, "got int"),
    "a tensor": (lambda: torch.zeros(3), "got Tensor"),
    "a class": (lambda: DynamicCache, "got type"),
    "an encoder-decoder's": (lambda: EncoderDecoderCache(DynamicCache(), DynamicCache()), "got EncoderDecoderCache"),
    "an encoder-decoder's, filled": (lambda: EncoderDecoderCache(filled(), DynamicCache()), "got EncoderDecoderCache"),
    "a hybrid model's": (
        lambda: DynamicCache(config=zoo.build("lfm2").config),
        "has recurrent states in 2 layers, the model in 0",
    ),
    "offloaded": (offloaded, "is offloaded"),
    "half precision": (changed(torch.Tensor.half), "holds torch.float16, the model computes torch.float32"),
    "bfloat16": (changed(torch.Tensor.bfloat16), "holds torch.bfloat16"),
    "double precision": (changed(torch.Tensor.double), "holds torch.float64"),
    "values in half precision": (values_in_half, "holds torch.float32 and torch.float16, the model computes"),
    "one layer in half precision": (changed(torch.Tensor.half, slice(1, 2)), "holds torch.float16"),
    "one row": (lambda: filled(rows=1), "has 1 rows, the prompt has 2"),
    "three rows": (lambda: filled(rows=3), "has 3 rows, the prompt has 2"),
    "another device": (changed(lambda states: states.to("meta")), "on meta in layer 0, the model .* on cpu"),
    "one layer on another device": (changed(lambda states: states.to("meta"), slice(2, 3)), "on meta in layer 2"),
    "fewer heads": (changed(lambda states: states[:, :1]), "1 heads .* in layer 0, the model has 2 heads"),
    "smaller heads": (changed(lambda states: states[..., :4]), "heads of 4 and 4 channels .* of 8 and 8"),
    "fewer layers": (of_layers(lambda layers: layers[:2]), "has 2 filled layers, the model fills 4"),
    "more layers": (of_layers(lambda layers: layers + layers[:2]), "has 6 filled layers, the model fills 4"),
    "an empty layer": (of_layers(lambda layers: [type(layers[0])(), *layers[1:]]), "has 3 filled layers"),
    "a shorter layer": (changed(lambda states: states[:, :, :3], slice(1, 2)), "has 3 of 6 tokens in layer 1"),
    "a static one in half precision": (lambda: prepared(torch.half), "holds torch.float16"),
    "a static one of three rows": (lambda: prepared(torch.float32, rows=3), "has 3 rows"),
}


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_that_does_not_fit_is_refused_before_any_work(
    llama: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, expected = CACHES[kind]
    monkeypatch.setattr(TreeTarget, "prefill", None)
    with pytest.raises(UnsupportedGenerationError, match=expected):
        llama.generate(IDS, **{CACHE_FIELD: make()}, speculative="prompt_lookup", **OPTIONS)


def test_rows_are_counted_as_often_as_they_are_answered(llama: Any) -> None:
    options = {**OPTIONS, "num_return_sequences": 2, "do_sample": True, "speculative": "prompt_lookup"}
    with pytest.raises(UnsupportedGenerationError, match="has 2 rows, the prompt has 4"):
        llama.generate(IDS, **{CACHE_FIELD: filled()}, **options)


def test_a_cache_made_under_autocast_is_continued_there(llama: Any) -> None:
    """Keys and values may be in another precision than those that the probe saw."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        caches = [DynamicCache(config=llama.config) for _ in range(2)]
        with torch.no_grad():
            for cache in caches:
                llama(input_ids=IDS[:, :LENGTH], **{CACHE_FIELD: cache}, use_cache=True)
        caches[1].layers[0].values = caches[1].layers[0].values.bfloat16()
        plain = llama.generate(IDS, **{CACHE_FIELD: caches[0]}, **OPTIONS)
        answer = llama.generate(IDS, **{CACHE_FIELD: caches[1]}, speculative="prompt_lookup", **OPTIONS)
        assert answer.shape == plain.shape


@pytest.mark.parametrize("name", ["moshi", "mistral", "gemma3_text", "llama4_text", "gemma4_text", "phi3"])
def test_windows_of_a_cache_are_kept_while_the_prompt_is_read(name: str, attach: Any) -> None:
    """Some models (moshi) mask causally over caches that drop what is behind the window."""
    model = attach(name)
    for seed in range(3):
        ids = torch.randint(3, zoo.VOCAB_SIZE, (ROWS, 14), generator=torch.Generator().manual_seed(seed))
        short = {**OPTIONS, "attention_mask": torch.ones_like(ids), "return_dict_in_generate": True}
        first, again = (model.generate(ids, **short) for _ in range(2))
        text = torch.cat([first.sequences, ids[:, :3]], dim=-1)
        options = {**OPTIONS, "attention_mask": torch.ones_like(text), "max_new_tokens": 10}
        plain = model.generate(text, **{CACHE_FIELD: first[CACHE_FIELD]}, **options)
        answer = model.generate(text, **{CACHE_FIELD: again[CACHE_FIELD]}, speculative="prompt_lookup", **options)
        assert torch.equal(plain, answer), seed
        for size in (3, 9):
            plain = model.generate(text, prefill_chunk_size=size, **options)
            assert torch.equal(
                plain, model.generate(text, prefill_chunk_size=size, speculative="prompt_lookup", **options)
            ), (seed, size)


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
@pytest.mark.parametrize("make", [lambda config: DynamicCache(config=config), lambda config: DynamicCache()],
                         ids=["of the config", "without layers"])  # fmt: skip
def test_layers_that_share_a_cache(name: str, make: Callable[[Any], DynamicCache]) -> None:
    """Handed in empty, then filled by plain and by speculative calls in turns, and returned."""
    config = copy.deepcopy(zoo.build(name).config)
    config.num_kv_shared_layers = 2
    torch.manual_seed(0)
    model: Any = SpeculativeGenerationMixin.attach(zoo.decisive(type(zoo.build(name))(config).eval()))
    caches, ids = [make(config), make(config), None, None], [IDS] * 4
    options: dict[str, Any] = {**OPTIONS, "return_dict_in_generate": True}
    for turn in range(4):
        for which, cache in enumerate(caches):
            options["attention_mask"] = torch.ones_like(ids[which])
            method = "prompt_lookup" if which % 2 and turn != 1 else None
            output = model.generate(ids[which], **{CACHE_FIELD: cache}, speculative=method, **options)
            caches[which] = output[CACHE_FIELD]
            ids[which] = torch.cat([output.sequences, IDS[:, :3]], dim=-1)
        assert all(torch.equal(ids[0], others) for others in ids), turn
        assert [cache.get_seq_length() for cache in caches] == [ids[0].shape[1] - 4] * 4
        for one, two in zip(caches[0].layers, caches[1].layers, strict=True):
            assert type(one) is type(two)
            if one.keys is not None:
                torch.testing.assert_close(one.keys, two.keys)
                torch.testing.assert_close(one.values, two.values)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text"])
def test_a_static_cache_is_returned_as_plain_returns_it(name: str) -> None:
    model: Any = SpeculativeGenerationMixin.attach(zoo.build(name))
    options: dict[str, Any] = {**OPTIONS, "return_dict_in_generate": True}
    made = {**options, "cache_implementation": "static", "max_cache_len": 40}
    passed = [StaticCache(config=model.config, max_cache_len=40) for _ in range(2)]
    outputs = [
        *(model.generate(IDS, speculative=method, **made) for method in (None, "prompt_lookup")),
        *(model.generate(IDS, speculative=method, **{CACHE_FIELD: cache}, **options)
          for method, cache in zip((None, "prompt_lookup"), passed, strict=True)),
    ]  # fmt: skip
    caches = [output[CACHE_FIELD] for output in outputs]
    assert caches[3] is passed[1]
    text = torch.cat([outputs[0].sequences, IDS[:, :3]], dim=-1)
    options["attention_mask"] = torch.ones_like(text)
    continued = [model.generate(text, **{CACHE_FIELD: cache}, **options).sequences for cache in caches]
    for output, cache, answer in zip(outputs[1:], caches[1:], continued[1:], strict=True):
        assert torch.equal(output.sequences, outputs[0].sequences)
        assert [(type(layer), layer.max_cache_len) for layer in cache.layers] == [
            (type(layer), layer.max_cache_len) for layer in caches[0].layers
        ]
        assert torch.equal(answer, continued[0])
        for one, two in zip(caches[0].layers, cache.layers, strict=True):
            torch.testing.assert_close(one.keys, two.keys)
            torch.testing.assert_close(one.values, two.values)
    SpeculativeGenerationMixin.detach(model)


def test_a_static_window_that_is_filled_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = SpeculativeGenerationMixin.attach(zoo.build("mistral"))
    cache = StaticCache(config=model.config, max_cache_len=40)
    text = model.generate(IDS, **{CACHE_FIELD: cache}, **OPTIONS)
    monkeypatch.setattr(TreeTarget, "prefill", None)
    with pytest.raises(UnsupportedGenerationError, match="has layers of StaticSlidingWindowLayer"):
        model.generate(text, **{CACHE_FIELD: cache}, speculative="prompt_lookup", max_new_tokens=3)
    SpeculativeGenerationMixin.detach(model)


def test_a_cache_goes_by_the_same_name_with_every_transformers(llama: Any) -> None:
    plain = llama.generate(IDS, **OPTIONS)
    cache = DynamicCache(config=llama.config)
    assert torch.equal(plain, llama.generate(IDS, cache=cache, speculative="prompt_lookup", **OPTIONS))
    assert cache.get_seq_length() == plain.shape[1] - 1
