"""The command `hf-specdec distill`, also for use under `accelerate launch`; checks options before loading a model."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hf_specdec.cli.inputs import check_places
from hf_specdec.cli.options import (
    Json,
    Model,
    Seed,
    TrainingPrecision,
    check_writable_directory,
    require_package,
    temperature_in_range,
)
from hf_specdec.cli.status import importing
from hf_specdec.cli.training_options import Output
from hf_specdec.errors import InvalidConfigError

Temperatures = Annotated[
    list[float] | None,
    typer.Option(
        callback=temperature_in_range,
        help="Sampling temperature; 0 is greedy. Can be repeated for a mix. Default: 0, 0.7 and 1 in turn.",
    ),
]  # fmt: skip

Prompts = Annotated[str | None, typer.Option(metavar="SOURCE", help="File with prompts, or a dataset name.")]
Server = Annotated[
    str | None,
    typer.Option(metavar="URL", help="URL of a vLLM or SGLang server that answers; --model then names the tokenizer."),
]


def distill(
    output: Output,
    prompts: Prompts = None,
    invent: Annotated[int, typer.Option(min=0, help="Number of additional prompts for the model to invent.")] = 0,
    model: Model = None,
    split: Annotated[str, typer.Option(metavar="NAME", help="Split of the dataset.")] = "train",
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of prompts.")] = None,
    temperature: Temperatures = None,
    turns: Annotated[int, typer.Option(min=1, help="User turns per conversation; missing ones are invented.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens per answer.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per generate() call, or concurrent requests.")] = 32,
    server: Server = None,
    server_model: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the model on the server.")] = None,
    unseeded: Annotated[
        bool, typer.Option("--unseeded", help="Send no seeds to the server (vLLM on a CPU fails with some seeds).")
    ] = False,
    seed: Seed = 0,
    dtype: TrainingPrecision = "bfloat16",
    as_json: Json = False,
) -> None:
    """Generate training data: let the target model answer prompts."""
    if prompts is None and not invent:
        raise InvalidConfigError("There are no prompts.", "Give --prompts or --invent N.")
    if server is None and (server_model is not None or unseeded):
        option = "--unseeded" if server_model is None else "--server-model"
        raise InvalidConfigError(f"{option} needs a server.", "Give --server URL, or drop it.")
    require_package("datasets", "Distilling", "training")
    if server is not None:
        require_package("openai", "Distilling from a server", "training")
    check_writable_directory(output, "--output")
    check_places(model, data=[] if prompts is None else [prompts])
    with importing(shown=not as_json):
        from hf_specdec import training
        from hf_specdec.cli.runs import load_training_target, print_result
        from hf_specdec.generation.loading import end_tokens, load_tokenizer
        from hf_specdec.training.distillation import check_new_data

    questions = _questions(prompts, invent, model, turns, split=split, limit=limit)
    check_new_data(output)
    config = training.DistillConfig(
        max_new_tokens=max_new_tokens, num_turns=turns, batch_size=batch_size, seed=seed,
        temperatures=tuple(temperature or training.DistillConfig().temperatures),
    )  # fmt: skip
    if server is None:
        target, tokenizer = load_training_target(model, dtype, shown=not as_json)
    else:
        tokenizer = load_tokenizer(model)
        target = training.ServerTeacher(
            server, tokenizer, server_model, num_requests=batch_size, seeded=not unseeded, end_ids=end_tokens(model)
        )
    training.distill(target, tokenizer, questions, output, config)
    conversations = training.read_conversations(output)
    answer_tokens = sum(sum(conversation.loss_mask) for conversation in conversations)
    result = {"output": str(output), "conversations": len(conversations), "answer_tokens": answer_tokens}
    print_result(result if server is None else {**result, "dropped": dict(target.lost)}, as_json)


def _questions(prompts: str | None, invent: int, model: str | None, turns: int, **read: Any) -> list[Any]:
    """Read and check the prompts, and append those to invent; `read` are options of `read_prompts`.

    Raises:
        InvalidConfigError: The file cannot be read or has no prompts, or see `check_prompts`.
    """
    from hf_specdec import training
    from hf_specdec.generation.loading import load_tokenizer
    from hf_specdec.training.distillation import check_prompts

    given = [] if prompts is None else training.read_prompts(prompts, **read)
    if not given and not invent:
        raise InvalidConfigError(f"--prompts {prompts} holds no prompts.", "Give another file, or --invent N.")
    questions = [*given, *training.invented_prompts(invent)]
    check_prompts(questions, load_tokenizer(model), turns)
    return questions
