"""The shipped checkpoint is what its page says: small, trained, with layer 17 a GDN layer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gdncheck.capture.checkpoint import model_shape
from gdncheck.capture.tokens import read_tokens
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "tiny-qwen35moe"


def report() -> dict:
    return json.loads((MODEL / "training.json").read_text())


def test_shape_suits_compiled_engines_and_layer_17_is_gdn() -> None:
    shape = model_shape(MODEL)
    assert shape.n_layers >= 20
    assert 17 in shape.gdn_layers
    assert [layer for layer in range(shape.n_layers) if layer not in shape.gdn_layers] == [3, 7, 11, 15, 19]
    assert (shape.n_key_heads, shape.n_value_heads, shape.key_dim, shape.value_dim) == (2, 4, 64, 64)
    assert shape.conv_width == 4
    assert shape.dtype == "bfloat16"


def test_checkpoint_stays_under_four_megabytes() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < 4e6


def test_weights_are_finite_bfloat16_and_as_many_as_the_page_says() -> None:
    tensors = load_file(MODEL / "model.safetensors")
    assert all(
        tensor.dtype == torch.bfloat16 and bool(tensor.isfinite().all()) for tensor in tensors.values()
    )
    assert sum(tensor.numel() for tensor in tensors.values()) == report()["parameters"]


def test_loss_fell_to_sixty_percent_also_on_bytes_it_never_saw() -> None:
    loss = report()["loss_nats_per_byte"]
    for name in ("held out", "training text"):
        assert loss["after"][name] <= 0.6 * loss["before"][name]
        assert loss["before"][name] == pytest.approx(5.545, abs=0.2), (
            "an untrained model guesses among 256 bytes"
        )
    text = report()["text"]
    assert not set(text["training files"]) & set(text["held-out files"])


def test_page_states_the_numbers_of_the_report() -> None:
    page = (MODEL / "README.md").read_text()
    loss = report()["loss_nats_per_byte"]
    for moment in ("before", "after"):
        for value in loss[moment].values():
            assert f"{value:.3f}" in page
    for state, groups in report()["quantiles on the first 2048 held-out bytes"].items():
        for measures in groups.values():
            for what, values in measures.items():
                row = next(line for line in page.splitlines() if line.startswith(f"| {what}, {state}"))
                assert len(row.split("|")) == len(values) + 3
                assert all(f" {value:.3g} " in page for value in values.values())


def test_tokenizer_s_ids_are_the_bytes() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    for text in ("def f(x):\n\treturn  x\n", "é € 🙂 \x00\x7f", "".join(map(chr, range(256)))):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text


def test_example_tokens_are_two_hundred_bytes_of_text() -> None:
    ids = read_tokens(ROOT / "examples" / "tokens200.json").ids
    assert ids is not None
    assert len(ids) == 200
    assert bytes(ids).decode("ascii").isprintable() or b"\n" in bytes(ids)


@pytest.mark.slow
def test_loss_of_the_shipped_weights_is_the_reported_one(tmp_path: Path) -> None:
    """Needs the same Python release, whose standard library the text is."""
    code = """
import sys
sys.path.insert(0, sys.argv[1])
import hashlib, json, train_tiny, torch, transformers
text = train_tiny.read_text(train_tiny.HELD_OUT_FILES)
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype="auto")
digest = hashlib.sha256(bytes(text.to(torch.uint8).numpy())).hexdigest()
print(json.dumps([digest, train_tiny.mean_loss(model, text)]))
"""
    run = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "examples"), str(MODEL)],
        env={**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    digest, loss = json.loads(run.stdout.splitlines()[-1])
    if digest != report()["text"]["held-out sha256"]:
        pytest.skip("this Python's standard library has another text than the one that was held out")
    assert loss == pytest.approx(report()["loss_nats_per_byte"]["after"]["held out"], rel=0.01)
