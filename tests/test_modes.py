"""Calls in every mode that PyTorch has, in changing order: what outlives a call must not belong to the mode it met."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import drafters
import zoo
from hf_specdec import (
    DrafterMismatchError,
    Eagle3Config,
    Eagle3Head,
    EagleConfig,
    EagleHead,
    InvalidConfigError,
    MedusaConfig,
    MedusaHeads,
    SpeculativeGenerationMixin,
)
from hf_specdec.training import (
    Conversation,
    DistillConfig,
    capture_features,
    distill,
    find_tree,
    head_arguments,
    read_conversations,
    train_eagle,
    train_medusa,
)
from hf_specdec.training.tree_search import count_correct
from hf_specdec.verification.features import LAST
from models import prompts
from torch_modes import MODES, default_device

ORDERS = (
    ("inference", "plain", "bfloat16", "inference", "gradients", "meta"),
    ("bfloat16", "inference", "deterministic", "float64", "plain", "meta", "float16", "inference"),
)
AUTO = "auto"
PROMPTS = {rows: prompts(rows) for rows in (1, 2)}  # a user's tensors, made before any default was changed
NAMES = [*(row.name for row in drafters.ROWS), AUTO]


def generate(model: Any, rows: int, **options: Any) -> torch.Tensor:
    ids, mask = PROMPTS[rows]
    torch.manual_seed(3)
    output: torch.Tensor = model.generate(
        ids, attention_mask=mask, **{"max_new_tokens": 24, "do_sample": False, **options}
    )
    return output


def attached() -> Any:
    return SpeculativeGenerationMixin.attach(copy.deepcopy(zoo.build("llama")))


def config_of(name: str, model: Any, answers: torch.Tensor) -> Any:
    added = drafters.BY_NAME["eagle" if name == AUTO else name].add(model, answers)
    return AUTO if name == AUTO else added


@pytest.fixture(scope="module")
def plain() -> dict[int, torch.Tensor]:
    return {rows: generate(zoo.build("llama"), rows) for rows in (1, 2)}


@pytest.mark.parametrize(
    ("name", "order"),
    [
        pytest.param(
            name, order, id=f"{name}-{order[0]}-first",
            marks=[] if order is ORDERS[0] or name in ("eagle", "token_recycling", "dflash", AUTO)
            else pytest.mark.slow,
        )
        for name in NAMES for order in ORDERS
    ],
)  # fmt: skip
def test_every_drafter_in_every_mode(name: str, order: tuple[str, ...], plain: dict[int, torch.Tensor]) -> None:
    """Its first call decides in which mode its tables are made; all later ones write to them."""
    model = attached()
    for number, mode in enumerate(order):
        rows = 1 + number % 2
        with MODES[mode]():
            config = config_of(name, model, plain[rows][:, -24:])
            assert torch.equal(generate(model, rows, speculative=config), plain[rows]), (mode, number)


@pytest.mark.parametrize("mode", MODES)
def test_sampling_in_every_mode(mode: str) -> None:
    """With each acceptance rule; a seed gives plain generation's tokens."""
    model, sampling = attached(), {"do_sample": True, "top_k": 8, "temperature": 0.9}
    wanted = generate(model, 1, **sampling)
    assistant = drafters.assistant_for(model, 0)
    with MODES[mode]():
        assert torch.equal(generate(model, 1, speculative=AUTO, **sampling), wanted)
        for acceptance in ("block", "rejection", "typical", "nucleus"):
            config = {"method": "draft_model", "num_steps": 3, "acceptance": acceptance}
            answer = generate(model, 1, speculative=config, assistant_model=assistant, **sampling)
            assert answer.shape == wanted.shape


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["inference", "bfloat16", "float64", "gradients", "meta"])
def test_attach_load_and_warm_up_in_a_mode_and_generate_outside(
    mode: str, plain: dict[int, torch.Tensor], tmp_path: Path
) -> None:
    """A head from a file lands with its values, where the model is, whatever the defaults are."""
    drafters.random_head(zoo.build("llama")).save_pretrained(tmp_path)
    model = copy.deepcopy(zoo.build("llama"))
    with MODES[mode]():
        SpeculativeGenerationMixin.attach(model)
        with pytest.warns(UserWarning, match="predicted"):  # its weights are random
            model.load_drafter(tmp_path, verify=True)
        model.warmup("auto", prompt_length=8)
    head = model.drafters["eagle"].head
    assert {(p.device.type, p.dtype, p.is_inference()) for p in head.parameters()} == {("cpu", torch.float32, False)}
    for speculative in ("eagle", AUTO):
        assert torch.equal(generate(model, 2, speculative=speculative), plain[2])


def test_learned_tables_are_saved_and_taken_back_in_any_mode(plain: dict[int, torch.Tensor]) -> None:
    model = attached()
    with torch.inference_mode():
        generate(model, 1, speculative=AUTO)
        state = model._speculation.state_dict()
        model._speculation.load_state_dict(state)
    assert torch.equal(generate(model, 1, speculative=AUTO), plain[1])
    model._speculation.load_state_dict(state)
    assert torch.equal(generate(model, 1, speculative=AUTO), plain[1])


def test_another_threads_defaults_are_not_ours(plain: dict[int, torch.Tensor]) -> None:
    """Default device and inference mode belong to a thread, the default dtype to the process."""
    model, found = attached(), dict[str, torch.Tensor]()

    def call(mode: str) -> None:
        with MODES[mode]():
            found[mode] = generate(model, 1, speculative=AUTO)

    for mode in ("inference", "plain", "meta", "bfloat16", "plain"):
        thread = threading.Thread(target=call, args=(mode,))
        thread.start()
        thread.join()
        assert torch.equal(found[mode], plain[1]), mode


def test_a_head_without_values_is_refused() -> None:
    model = attached()
    with default_device("meta"):
        head = EagleHead(EagleConfig.for_target(model.config))
    with pytest.raises(DrafterMismatchError, match="meta device: they have no values"):
        model.load_drafter(head)
    with default_device("meta"), pytest.raises(DrafterMismatchError, match="set_default_device"):
        model.load_drafter(MedusaHeads(MedusaConfig.for_target(model.config)))


TALKS = [Conversation.of([5, 6, 7], [8, 9, 10, 11, 12, 13]), Conversation.of([10, 11], [12, 13, 14, 15, 16, 17, 18])]
KINDS = ("medusa", "eagle", "eagle3")


def new_head(kind: str, target: Any) -> Any:
    """One that the mode under test has not made: of weights on the meta device nobody learns."""
    torch.manual_seed(0)
    if kind == "medusa":
        return MedusaHeads(MedusaConfig.for_target(target.config, medusa_num_heads=2))
    if kind == "eagle":
        return EagleHead(EagleConfig.for_target(target.config))
    return Eagle3Head(Eagle3Config.for_target(target.config, draft_vocab_size=None))


def trained(head: Any, kind: str, target: Any, folder: Path) -> tuple[Any, Any]:
    """A head trained on captured features and measured as it learns, and its tree."""
    layers = (*getattr(head, "feature_layers", ()), LAST)
    captured = capture_features(target, TALKS, folder / "features", layers=layers)
    few = {"learning_rate": 3e-3, "max_steps": 4, "save_steps": 2, "use_cpu": True, "disable_tqdm": True}
    options = head_arguments(folder / "run", few, held_out=True, per_device_train_batch_size=2)
    train: Any = train_medusa if kind == "medusa" else train_eagle
    head = train(target, head, captured, options, held_out=TALKS)
    return head, find_tree(target, head, captured, num_nodes=4, top_k=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [kind if kind == "eagle3" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_training_in_every_mode(kind: str, tmp_path: Path) -> None:
    """The same weights and the same tree."""
    target = zoo.build("llama")
    wanted, tree = trained(new_head(kind, target), kind, target, tmp_path / "plain")
    for mode in MODES:
        head = new_head(kind, target)
        with MODES[mode]():
            head, found = trained(head, kind, target, tmp_path / mode)
        assert (found.choices, found.accuracies) == (tree.choices, tree.accuracies), mode
        for name, weight in head.state_dict().items():
            assert torch.allclose(weight, wanted.state_dict()[name], rtol=1e-4, atol=1e-6), (mode, name)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_any_dtype_is_measured_as_it_is_and_trained_in_float32(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    target = zoo.build("llama")
    head, places = new_head(kind, target).to(dtype), [13, 12] if kind == "medusa" else [11, 9]
    assert count_correct(target, head, TALKS, num_steps=2, top_k=4).counted.tolist() == places
    assert {parameter.dtype for parameter in head.parameters()} == {dtype}
    head, _ = trained(head, kind, target, tmp_path)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.float32}


def test_a_head_made_in_inference_mode_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    target = zoo.build("llama")
    with torch.inference_mode():
        head = new_head("medusa", target)
    with pytest.raises(InvalidConfigError, match="head's weights were created in"):
        trained(head, "medusa", target, tmp_path)
    assert not (tmp_path / "run").exists()


def test_a_head_that_drafts_is_frozen_and_a_copy_of_it_learns(tmp_path: Path) -> None:
    target = zoo.build("llama")
    head = new_head("eagle3", target)
    SpeculativeGenerationMixin.attach(target).load_drafter(head)
    with pytest.raises(InvalidConfigError, match="weights of the head are frozen"):
        trained(head, "eagle3", target, tmp_path / "head")
    learned, _ = trained(copy.deepcopy(head).requires_grad_(), "eagle3", target, tmp_path / "copy")
    assert not torch.equal(learned.lm_head.weight, head.lm_head.weight)


@pytest.mark.parametrize("mode", MODES)
def test_distilling_in_every_mode(mode: str, tmp_path: Path) -> None:
    """The same rows."""
    tokenizer, asked = zoo.chat_tokenizer(), ["w05 w06", "w07"]
    config = DistillConfig(max_new_tokens=6, temperatures=(0.0, 0.8))

    def answers(folder: Path) -> list[Conversation]:
        return read_conversations(distill(zoo.build("llama"), tokenizer, asked, folder, config, progress=False))

    wanted = answers(tmp_path / "plain")
    with MODES[mode]():
        assert answers(tmp_path / "mode") == wanted
