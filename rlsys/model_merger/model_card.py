"""The README.md of a merged model: its start model, data and method, and the figures of its run."""

from pathlib import Path

from rlsys.telemetry.jsonl import read_jsonl
from rlsys.utils.hub import is_hub_id

SHOWN = ("critic/score/mean", "val-core/", "val-aux/", "train/loss", "val/", "actor/entropy", "response_length/mean")


def write_model_card(checkpoint: Path, target: Path, *, title: str) -> None:
    """Write README.md with the metadata that the Hugging Face Hub reads, if the checkpoint is in a run's folder."""
    step = next((path for path in (checkpoint, *checkpoint.parents) if path.name.startswith("global_step_")), None)
    if step is None or not (step.parent / "config.yaml").is_file():
        return
    from huggingface_hub import ModelCardData
    from omegaconf import OmegaConf

    number = int(step.name.removeprefix("global_step_"))
    settings = OmegaConf.load(step.parent / "config.yaml")
    model = OmegaConf.select(settings, "actor_rollout_ref.model.path") or OmegaConf.select(settings, "model.path")
    estimator = OmegaConf.select(settings, "algorithm.adv_estimator")
    files = OmegaConf.select(settings, "data.train_files")
    base = model.partition("@")[0] if model and is_hub_id(model) else None
    tags = ["rlsys", *([estimator] if estimator else [])]
    head = ModelCardData(base_model=base, library_name="transformers", pipeline_tag="text-generation", tags=tags)
    facts = {"start": model or "the start model", "method": estimator, "data": files, "step": number}
    rows = {key: value for key, value in facts.items() if value is not None} | _figures(step.parent, number)
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    text = f"---\n{head.to_yaml()}\n---\n\n# {title}\n\nTrained with rlsys.\n\n| | |\n| --- | --- |\n{table}\n"
    (target / "README.md").write_text(text)


def _figures(run: Path, step: int) -> dict[str, str]:
    """The last value of each metric that a reader of the card looks for, up to a step."""
    figures: dict[str, str] = {}
    path = run / "metrics.jsonl"
    for metrics in read_jsonl(path) if path.is_file() else ():
        if metrics.get("step", 0) <= step:
            figures |= {k: f"{v:.4g}" for k, v in metrics.items() if k.startswith(SHOWN) and isinstance(v, float)}
    return figures
