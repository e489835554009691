"""What all trainers read: SmolLM2 as a Hugging Face folder, the same documents, the same draft vocabulary.

FOLDER/target/            config.json, model.safetensors (bf16), which every trainer loads
FOLDER/train.jsonl        token ids and loss masks of documents that fit a row
FOLDER/heldout.jsonl      a few more, which only our trainer asks for
FOLDER/rows.npz           the documents packed: ids, documents [N, length], for a trainer that does not pack
FOLDER/vocabulary.npy     the draft vocabulary: target ids, ascending
"""

import gzip
import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from eagle3_jax.data.packing import pack
from eagle3_jax.data.vocabulary import draft_vocabulary
from eagle3_jax.models.gguf import find_demo_model, gguf_config, gguf_tensors

HELDOUT = 8


def write_target(folder: Path) -> None:
    """The demo model as a folder that transformers and SpecJAX read; written whole or not at all."""
    source = find_demo_model()
    config = gguf_config(source)
    config.pop("hub_id", None)
    # SpecJAX reads the key of older transformers.
    config |= {"rope_theta": config["rope_parameters"]["rope_theta"], "dtype": "bfloat16"}
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    temporary.mkdir(parents=True)
    tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in gguf_tensors(source)}
    save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
    (temporary / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    temporary.rename(folder)


def write_data(folder: Path, answers: Path, count: int, length: int, vocabulary: int, config: dict) -> dict[str, float]:
    """The data files from the first `count` documents of `answers` (JSONL.gz of token ids and masks) that fit a row of
    `length`; returns what they hold. config: that of the target."""
    documents = []
    with gzip.open(answers, "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            if len(row["input_ids"]) <= length:
                documents.append((np.array(row["input_ids"], np.int32), np.array(row["loss_mask"], bool)))
            if len(documents) == count + HELDOUT:
                break
    train, heldout = documents[:-HELDOUT], documents[-HELDOUT:]
    for name, part in (("train", train), ("heldout", heldout)):
        rows = (json.dumps({"input_ids": ids.tolist(), "loss_mask": mask.astype(int).tolist()}) for ids, mask in part)
        (folder / f"{name}.jsonl").write_text("".join(row + "\n" for row in rows), encoding="utf-8")
    packed = pack(train, length)
    np.savez(folder / "rows.npz", ids=packed.input_ids, documents=packed.document_ids)
    ends = np.atleast_1d(config["eos_token_id"]).tolist()
    np.save(folder / "vocabulary.npy", draft_vocabulary(train, vocabulary, config["vocab_size"], ends))
    tokens = sum(len(ids) for ids, _ in train)
    supervised = sum(int(mask.sum()) for _, mask in train)
    return {"documents": len(train), "tokens": tokens, "supervised": supervised, "rows": len(packed.members)}
