"""The trainer of vLLM's speculators (PyTorch), taking turns: `train_speculators.py JOB.json`, in its environment.

Its data set, packing, draft, loss, trainer and optimiser are used as `speculators train` uses them; three things are
not as there: vLLM, which serves the target's states, is replaced by transformers (its LlamaModel over each document,
states handed over in memory), the device is named `cpu`, and the loss is its eager one, since the fused one is Triton.
Options: dtype (hidden states and autocast), attention (sdpa or eager), row (tokens of a step, documents packed).
"""

import json
import sys
import warnings
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.peers.turns import Turns  # noqa: E402


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    versions = {name: metadata.version(name) for name in ("speculators", "torch", "transformers")}
    turns = Turns(job["turn_tokens"], job["warm_up"], {"versions": versions})
    warnings.filterwarnings("ignore", message=".*pin_memory.*")

    import torch
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.dataloader import create_train_val_loaders
    from speculators.train.trainer import Trainer, TrainerConfig

    torch.set_num_threads(job["threads"])
    torch.accelerator.synchronize = lambda *_: None  # called to time a step; there is no accelerator
    options = job["options"]
    dtype = getattr(torch, options["dtype"])
    draft = make_draft(job, options["attention"])
    documents = write_documents(job)
    teacher = make_teacher(job["target"], dtype, draft.target_layer_ids, documents)
    train_loader, _ = create_train_val_loaders(
        data_path=documents,
        total_seq_len=int(options["row"]),
        hidden_states_dtype=dtype,
        transfer=teacher,
        vllm_endpoint="",
        on_missing="raise",
        verifier_name_or_path=job["target"],
        request_timeout=None,
        max_retries=0,
        generation_validation_retries=0,
        max_consecutive_generation_failures=1,
        hidden_size=draft.config.transformer_layer_config.hidden_size,
        num_target_layers=len(draft.target_layer_ids),
        num_workers=0,
        prefetch_factor=1,
        preprocess=shift_batch,
        train_data_ratio=0.99,
    )

    class OnCPU(Trainer):
        """Where the trainer asks for the device of its rank, it is the CPU."""

        local_rank = property(lambda self: "cpu", lambda self, value: None)
        device_type = property(lambda self: "cpu", lambda self, value: None)

    forward, _ = draft.get_trainer_kwargs(
        loss_fn="kl_div", loss_implementation="eager", ttt_steps=job["ttt_steps"], ttt_step_loss_decay=1.0
    )
    config = TrainerConfig(
        lr=1e-4,
        num_epochs=1000,
        save_path=f"{job['scratch']}/checkpoints",
        train_call_kwargs=forward,
        hidden_states_dtype=dtype,
    )
    trainer = OnCPU(draft, config, train_loader)
    for epoch in range(config.num_epochs):
        trainer.train_epoch(epoch, step_callback=lambda: turns.step(teacher.take_count()))


def make_draft(job: dict, attention: str):
    """An untrained draft of one full-attention layer, made as `speculators train` makes it."""
    import numpy as np
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.cli import create_transformer_layer_config

    layer = create_transformer_layer_config(
        verifier_name_or_path=job["target"],
        num_layers=1,
        draft_arch="llama",
        hidden_act=None,
        sliding_window=job["length"],
        full_attention_indices=[0],
    )
    vocabulary = np.load(f"{job['inputs']}/vocabulary.npy").astype(np.int64)
    inside = torch.zeros(layer.vocab_size, dtype=torch.bool)
    inside[torch.from_numpy(vocabulary)] = True
    return Eagle3DraftModel.from_training_args(
        verifier_config=layer,
        t2d=inside,
        d2t=torch.from_numpy(vocabulary - np.arange(len(vocabulary))),
        verifier_name_or_path=job["target"],
        draft_vocab_size=len(vocabulary),
        norm_before_residual=False,
        ttt_steps=job["ttt_steps"],
        draft_attn_impl=attention,
    )


def write_documents(job: dict) -> str:
    """The documents as the data set that `speculators prepare-data` writes."""
    from datasets import Dataset

    rows = [json.loads(line) for line in Path(f"{job['inputs']}/train.jsonl").read_text("utf-8").splitlines()]
    columns = {key: [row[key] for row in rows] for key in ("input_ids", "loss_mask")}
    columns["seq_len"] = [len(ids) for ids in columns["input_ids"]]
    folder = f"{job['scratch']}/documents"
    Dataset.from_dict(columns).with_format("torch").save_to_disk(folder)
    return folder


def make_teacher(target: str, dtype, taps: list[int], documents: str):
    """The target behind the interface by which speculators asks for states; nothing is stored."""
    import torch
    from datasets import load_from_disk
    from hs_connectors import HiddenStatesTransfer
    from transformers import AutoModel

    class Teacher(HiddenStatesTransfer):
        """Runs the target over a document when its states are asked for, and counts the tokens."""

        def __init__(self):
            self._model = AutoModel.from_pretrained(target, dtype=dtype, attn_implementation="sdpa").eval()
            self._states: list[torch.Tensor] = []
            blocks = [*self._model.layers, self._model.norm]  # the input of the norm is the last block's output
            for point in (*taps, len(blocks) - 1):
                blocks[point].register_forward_pre_hook(lambda _, inputs: self._states.append(inputs[0][0]))
            self._count, self._documents = 0, load_from_disk(documents)

        @torch.no_grad()
        def get_cached(self, file_idx: int) -> dict[str, torch.Tensor]:
            ids = self._documents[file_idx]["input_ids"]
            self._states.clear()
            self._model(ids[None], use_cache=False)
            self._count += len(ids)
            return {"hidden_states": torch.stack(self._states, dim=1), "token_ids": ids}

        def get_generated(self, hs_transfer_params):
            raise RuntimeError("get_cached has every document, so nothing is to be generated")

        def take_count(self) -> int:
            """Tokens since the last call."""
            count, self._count = self._count, 0
            return count

    return Teacher()


if __name__ == "__main__":
    main()
