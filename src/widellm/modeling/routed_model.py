"""Saving for a routed model by transformers' own method names: what any trainer, script or PEFT already calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class RoutedModel:
    """Behaviour put before the class of a causal LM; see `swap`."""

    _widellm_keeps_name = True
    """transformers writes the class's name into config.json, and other programs look it up there."""

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> Any:
        """transformers' own, and beside it what widellm adds: the full form, which from_pretrained loads.

        Unlike `widellm.save` it writes into a directory that may exist, as transformers does. A model with PEFT
        adapters loaded into it writes those alone, as in transformers.
        """
        from widellm.modeling.checkpoint import write_full

        if getattr(self, "_hf_peft_config_loaded", False):
            return super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        push = kwargs.pop("push_to_hub", False)
        names = ("repo_id", "private", "revision", "commit_message", "create_pr")
        upload = {name: kwargs.pop(name) for name in names if name in kwargs}
        weights = kwargs.pop("state_dict", None)  # a trainer may have gathered them from other processes
        dense_save = super().save_pretrained  # type: ignore[misc]

        def write(state_dict: dict[str, Any]) -> None:
            dense_save(save_directory, *args, state_dict=state_dict, **kwargs)

        if not kwargs.get("is_main_process", True):
            return None  # of several processes one writes
        write_full(self, Path(save_directory), write, weights)
        if push:
            name = upload.pop("repo_id", None) or Path(save_directory).name
            self.push_to_hub(name, token=kwargs.get("token"), **{k: v for k, v in upload.items() if v is not None})
        return None

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Upload the full form with a generated model card; see `checkpoint.push` for the arguments."""
        from widellm.modeling.checkpoint import push

        return push(self, repo_id, **kwargs)
