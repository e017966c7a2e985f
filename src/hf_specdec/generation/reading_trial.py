"""Try an ambiguous head in each of its readings, and keep the one whose drafts the target accepts most often.

The target writes a few texts. On these, every reading drafts after every token, as the head would in generation. The
measure is the expected number of accepted tokens per draft with lossless sampling (https://arxiv.org/abs/2211.17192):
computing it needs far less text than counting accepted tokens. The result is stored on disk for each head and target.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from huggingface_hub import constants
from torch import Tensor, nn
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

from hf_specdec.atomic import write_text
from hf_specdec.errors import InvalidConfigError, first_sentence
from hf_specdec.heads.attention import AlignedAttention
from hf_specdec.heads.head import DraftHead
from hf_specdec.heads.readings import Reading
from hf_specdec.records import read_json
from hf_specdec.transformers_private import model_name
from hf_specdec.verification.features import Features, FeatureTap
from hf_specdec.verification.model import lm_head_rows, text_config

logger = logging.getLogger(__name__)

PROMPTS = (
    "What causes the tides of the ocean?",
    "Write a short letter to a friend about a walk in the mountains.",
    "Write a Python function that returns the largest number of a list.",
    "A train leaves at 9:40 and arrives at 12:15. How long does the journey take? Explain each step.",
    "Give three tips for learning a new language.",
    "Summarise in two sentences why the Roman Empire declined.",
)
"""Questions for chat models."""

TEXT_TOKENS = 48
"""Tokens of each continuation."""
DRAFT_STEPS = 6
"""Tokens per draft; more than one, because `norm_output` changes drafts only from the second token on."""
MIN_GAIN = 0.05
"""Accepted tokens per draft that a reading must gain, on average, to replace the documented one.

Measured: readings of random heads differ by up to 0.043 in every text; a wrong layer costs a trained head 0.08."""
MIN_STANDARD_ERRORS = 2.0
"""The same in standard errors of the gain over the texts; smaller gains are noise."""
VERSION = 2
"""Part of the key of stored results; a new version repeats all trials."""
SAMPLED_VALUES = 64
"""Number of values read at each end of a tensor to identify it."""


@torch.no_grad()
def choose_reading(model: PreTrainedModel, head: Any, readings: Sequence[Reading]) -> Reading:
    """Return the reading with the most accepted tokens, or the first if no gain exceeds `MIN_GAIN` and the noise.

    Returns the stored result of an earlier trial if there is one, else logs and stores the result. Does not change the
    random state of the process, but leaves the EAGLE-3 head, bound to the target, in the last reading that was tried.
    The documented reading comes first.
    """
    kept = _kept_file(model, head, readings)
    known = None if kept is None else _read(kept, readings)
    if known is not None:
        return known
    config, texts = text_config(model), _write_texts(model)
    layers = set()
    for reading in readings:
        head.read_as(reading, config)
        layers.update(head.feature_layers)
    scores: dict[Reading, list[float]] = {reading: [] for reading in readings}
    for text in texts:
        with FeatureTap(model, sorted(layers)) as tap:
            logits = model(input_ids=text.token_ids).logits
        features = tap.take()
        for reading in readings:
            head.read_as(reading, config)
            scores[reading].append(_accepted_tokens(model, head, text, features, logits))
    lengths, better = {reading: fmean(each) for reading, each in scores.items()}, []
    for reading in readings[1:]:  # the same texts for all readings, so only the spread of differences is noise
        gains = [new - old for new, old in zip(scores[reading], scores[readings[0]], strict=True)]
        noise = stdev(gains) / math.sqrt(len(gains))
        if fmean(gains) > max(MIN_GAIN, MIN_STANDARD_ERRORS * noise):
            better.append(reading)
    best = max(better, key=lambda reading: lengths[reading], default=readings[0])
    figures = "; ".join(f"{reading}: {length:.2f}" for reading, length in lengths.items())
    logger.log(
        logging.INFO if best == readings[0] else logging.WARNING,
        "%s allows %d readings. Accepted tokens per draft of %d: %s. Chosen: %s. "
        "load_drafter(..., reading={...}) sets it.",
        head.name_or_path or type(head).__name__, len(readings), DRAFT_STEPS, figures, best,
    )  # fmt: skip
    if kept is not None:
        _write(kept, best, lengths)
    return best


def _accepted_tokens(model: PreTrainedModel, head: Any, text: TrialText, features: Features, logits: Tensor) -> float:
    """Return the expected number of accepted tokens of a draft, averaged over all its positions in the continuation.

    `features` and `logits` `[1, T, V]` are the target's, of all T tokens of the text.
    """
    ids, device = head.hot_token_ids, head.device
    probs = logits.float().softmax(-1).to(device)
    probs = probs if ids is None else probs[:, :, ids]
    lm_head = lm_head_rows(model, ids) if head.shares_lm_head else None
    embeddings = head.embedding_for(model)(text.token_ids[:, 1:]).to(device, head.dtype)
    hidden = head.fuse(features.of(head.feature_layers)[:, :-1].to(device, head.dtype))
    attend = AlignedAttention(head.config.num_hidden_layers)
    positions = torch.arange(hidden.shape[1], device=device)[None]
    first = max(text.prompt_length - 2, 0)  # entry t reads token t + 1, predicts t + 2
    starts = hidden.shape[1] - DRAFT_STEPS + 1 - first
    reached, total = torch.ones(starts, dtype=torch.float32, device=device), 0.0
    for step in range(DRAFT_STEPS if head.config.mask_token_id is None else 1):  # P-EAGLE recycles no outputs
        output = head(embeddings, hidden, positions, attend)
        drafted = head.score(output, lm_head).float().softmax(-1)
        overlap = torch.minimum(drafted, probs[:, 1:]).sum(-1)[0, first:]
        reached = reached * overlap[step : step + starts]
        total += float(reached.mean())
        hidden = torch.cat([hidden[:, :1], output[:, :-1]], dim=1)
    return total


# ----------------------------------------------------------------------------------------------- texts


@dataclass(frozen=True, slots=True)
class TrialText:
    """A prompt and the target's continuation."""

    token_ids: Tensor  # [1, T]
    prompt_length: int


def _write_texts(model: Any) -> list[TrialText]:
    """Let a target continue a few prompts by `TEXT_TOKENS` tokens each, and return the texts.

    A chat model whose tokenizer is on this machine answers `PROMPTS` greedily. Any other model samples as many texts
    from its BOS token (token 0 if it has none or several), with a fixed seed. The random state of the process does not
    change; the model's generation config is replaced during the call.
    """
    encoded = _chat_prompts(model)
    if encoded is None:
        first = model.generation_config.bos_token_id
        begin = first if isinstance(first, int) else 0
        ids = torch.full((len(PROMPTS), 1), begin, dtype=torch.long, device=model.device)
        mask = torch.ones_like(ids)
    else:
        ids, mask = encoded["input_ids"].to(model.device), encoded["attention_mask"].to(model.device)
    stored = model.generation_config
    tokens = {name: getattr(stored, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = range(torch.accelerator.device_count()) if accelerator is not None else []
    with torch.random.fork_rng(devices, device_type="cpu" if accelerator is None else accelerator.type):
        torch.manual_seed(0)
        try:
            model.generation_config = GenerationConfig(**tokens)  # without the user's other settings
            written = model.generate(
                input_ids=ids, attention_mask=mask, do_sample=encoded is None, speculative=None,
                max_new_tokens=TEXT_TOKENS, min_new_tokens=TEXT_TOKENS,
            )  # fmt: skip
        finally:
            model.generation_config = stored
    return [
        TrialText(row[len(mask_row) - length :][None], length)
        for row, mask_row, length in zip(written, mask, mask.sum(-1).tolist(), strict=True)
    ]


def _chat_prompts(model: Any) -> Any:
    """Return `PROMPTS` as left-padded ids and mask `[B, P]`; None without a local tokenizer whose template works."""
    name = model_name(model.config)
    if not name:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
        if not tokenizer.chat_template:
            return None
        tokenizer.padding_side = "left"
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return tokenizer.apply_chat_template(
            [[{"role": "user", "content": prompt}] for prompt in PROMPTS],
            add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True,
        )  # fmt: skip
    except Exception as error:  # tokenizers and templates raise many types; sampled texts serve as well
        logger.info("Texts are sampled, because the tokenizer of %s cannot be used: %s", name, first_sentence(error))
        return None


# ----------------------------------------------------------------------------------------------- kept results


def _kept_file(model: PreTrainedModel, head: DraftHead, readings: Sequence[Reading]) -> Path | None:
    """Return the file, which may not exist, of the result for this head, target and list of readings.

    None if the weights of head or target cannot be identified.
    """
    chosen = ("norm_output", "eagle_aux_hidden_state_layer_ids")  # set by `read_as`, so not part of the key
    fields = {name: value for name, value in head.config.to_dict().items() if name not in chosen}
    facts = [VERSION, [str(reading) for reading in readings], repr(head.ambiguity), fields]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    digest.update(model.config.to_json_string(use_diff=False).encode())
    for module in (head, model):
        parts = list(_identity(module))
        if not parts:
            return None
        for part in parts:
            digest.update(part)
    return Path(constants.HF_HOME) / "hf-specdec" / "readings" / f"{digest.hexdigest()[:40]}.json"


def _identity(module: nn.Module) -> Iterator[bytes]:
    """Yield names, shapes, dtypes and some values of plain tensors, without quantised, sharded and offloaded ones."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and not tensor.is_meta and tensor.numel():
            flat = tensor.detach().reshape(-1)
            ends = torch.cat([flat[:SAMPLED_VALUES], flat[-SAMPLED_VALUES:]]).cpu()
            yield f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode()
            yield ends.view(torch.uint8).numpy().tobytes()


def _read(file: Path, readings: Sequence[Reading]) -> Reading | None:
    """Return the stored one of these readings; None if the file does not exist, is invalid or names another."""
    if not file.is_file():
        return None
    try:
        chosen = read_json(file).get("reading")
    except InvalidConfigError:
        return None
    return next((reading for reading in readings if str(reading) == chosen), None)


def _write(file: Path, best: Reading, lengths: dict[Reading, float]) -> None:
    content = {"reading": str(best), "accepted_tokens": {str(key): round(value, 4) for key, value in lengths.items()}}
    try:
        write_text(file, json.dumps(content, indent=1))
    except InvalidConfigError as error:
        logger.warning("The chosen reading is not kept for the next time: %s", error)
