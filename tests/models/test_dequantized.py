"""Quantized weights are read to the values that their own libraries give, on every shard.

Tensors are packed here value by value, in plain Python; fp8 and MXFP4 are held against
transformers' own conversion besides.
"""

import json

import pytest

from hocket.spec.errors import ModelError, WeightsError
from tests.families import FAMILIES, LLAMA

pytestmark = pytest.mark.torch

WIDE = {**LLAMA, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
WIDE |= {"num_key_value_heads": 4, "head_dim": 16}


def words(values, bits, order=None):
    """[n, p k] integers to [n, k] words of 32 bits, along the last dim."""
    import torch

    per = 32 // bits
    rows = []
    for row in values.tolist():
        packed = []
        for start in range(0, len(row), per):
            word = 0
            for place in range(per):
                index = start + (place if order is None else order[place])
                word |= (row[index] if index < len(row) else 0) << (bits * place)
            packed.append(word - (1 << 32) if word >= 1 << 31 else word)
        rows.append(packed)
    return torch.tensor(rows, dtype=torch.int32)


def fp8(stem, weight, draw):
    """Blocks of 16 x 16, which do not divide every weight."""
    import torch

    rows, columns = weight.shape
    scale = torch.rand(-(-rows // 16), -(-columns // 16), generator=draw) + 0.5
    stored = weight.to(torch.float8_e4m3fn)
    wide = scale.repeat_interleave(16, 0)[:rows].repeat_interleave(16, 1)[:, :columns]
    return stored.float() * wide, {f"{stem}.weight": stored, f"{stem}.weight_scale_inv": scale}


def gptq(stem, weight, draw, *, less_one=True):
    """Groups of 16 inputs, in an order of their own (desc_act)."""
    import torch

    out, inputs = weight.shape
    q = torch.randint(16, (inputs, out), generator=draw)
    zeros = torch.randint(16, (inputs // 16, out), generator=draw)
    scales = (torch.rand(inputs // 16, out, generator=draw) * 0.02).half()
    group = (torch.arange(inputs) // 16)[torch.randperm(inputs, generator=draw)]
    values = (q - zeros[group]) * scales.float()[group]
    stored = (zeros - 1) % 16 if less_one else zeros
    return values.T, {
        f"{stem}.qweight": words(q.T, 4).T.contiguous(),
        f"{stem}.qzeros": words(stored, 4),
        f"{stem}.scales": scales,
        f"{stem}.g_idx": group.int(),
    }


def gptq_v2(stem, weight, draw):
    return gptq(stem, weight, draw, less_one=False)


def awq(stem, weight, draw):
    import torch

    out, inputs = weight.shape
    q = torch.randint(16, (inputs, out), generator=draw)
    zeros = torch.randint(16, (inputs // 16, out), generator=draw)
    scales = (torch.rand(inputs // 16, out, generator=draw) * 0.02).half()
    group = torch.arange(inputs) // 16
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return ((q - zeros[group]) * scales.float()[group]).T, {
        f"{stem}.qweight": words(q, 4, order),
        f"{stem}.qzeros": words(zeros, 4, order),
        f"{stem}.scales": scales,
    }


def compressed(stem, weight, draw, *, zero=False):
    """compressed-tensors' pack-quantized, 4 bits."""
    import torch

    out, inputs = weight.shape
    q = torch.randint(-8, 8, (out, inputs), generator=draw)
    scale = (torch.rand(out, inputs // 16, generator=draw) * 0.02).bfloat16()
    zeros = torch.randint(-8, 8, (out, inputs // 16), generator=draw) if zero else 0 * scale.int()
    wide = [t.repeat_interleave(16, 1) for t in (scale.float(), zeros)]
    found = {
        f"{stem}.weight_packed": words(q + 8, 4),
        f"{stem}.weight_scale": scale,
        f"{stem}.weight_shape": torch.tensor([out, inputs]),
    }
    if zero:
        found[f"{stem}.weight_zero_point"] = words((zeros + 8).T, 4).T.contiguous()
    return (q - wide[1]) * wide[0], found


def compressed_zero(stem, weight, draw):
    return compressed(stem, weight, draw, zero=True)


def int8(stem, weight, draw):
    """compressed-tensors' int-quantized: one scale a row."""
    import torch

    q = torch.randint(-127, 128, weight.shape, generator=draw)
    scale = torch.rand(len(weight), 1, generator=draw) * 0.01
    return q * scale, {
        f"{stem}.weight": q.to(torch.int8),
        f"{stem}.weight_scale": scale,
        f"{stem}.input_scale": torch.ones(1),
    }


def nf4(stem, weight, draw):
    """bitsandbytes' four bits with quantized scales; blocks of 64 run across rows."""
    import torch

    elements = weight.numel()
    codes = torch.randint(16, (elements,), generator=draw)
    table = torch.linspace(-1, 1, 16) ** 3
    outer_table = torch.linspace(-1, 1, 256)
    blocks = elements // 64
    code = torch.randint(256, (blocks,), generator=draw)
    outer = torch.rand(-(-blocks // 256), generator=draw) * 0.05
    absmax = outer_table[code] * outer[torch.arange(blocks) // 256] + 0.1
    values = (table[codes] * absmax.repeat_interleave(64)).view(weight.shape)
    state = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape),
        "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.1,
    }  # fmt: skip
    name = f"{stem}.weight"
    return values, {
        name: (codes[0::2] << 4 | codes[1::2]).to(torch.uint8).view(-1, 1),
        f"{name}.absmax": code.to(torch.uint8),
        f"{name}.quant_map": table,
        f"{name}.nested_absmax": outer,
        f"{name}.nested_quant_map": outer_table,
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }


def llm_int8(stem, weight, draw):
    import torch

    q = torch.randint(-127, 128, weight.shape, generator=draw)
    scb = torch.rand(len(weight), generator=draw)
    return q * scb[:, None] / 127, {
        f"{stem}.weight": q.to(torch.int8),
        f"{stem}.SCB": scb,
        f"{stem}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }


def _groups(kind, bits):
    return {
        "quant_method": "compressed-tensors", "format": kind,
        "config_groups": {"group_0": {"weights": {"num_bits": bits}}},
    }  # fmt: skip


CASES = {
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [16, 16]}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True}),
    "gptq_v2": (gptq_v2, {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "version": "GEMM"}),
    "pack": (compressed, _groups("pack-quantized", 4)),
    "pack_zero": (compressed_zero, _groups("pack-quantized", 4)),
    "int": (int8, _groups("int-quantized", 8)),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "llm_int8": (llm_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}


def folders(tmp_path, config, quantize, how, seed=0):
    """A model as quantized, and the same with the values that this stands for."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    draw = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    kind = config["model_type"]
    rest = {key: value for key, value in config.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **rest))
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    model.save_pretrained(plain)
    tensors = load_file(plain / "model.safetensors")
    quantized = dict(tensors)
    for key in tensors:
        stem = key.removesuffix(".weight")
        if stem != key and tensors[key].dim() == 2 and ("proj" in key or "experts" in key):
            del quantized[key]
            values, made = quantize(stem, tensors[key], draw)
            tensors[key] = values.contiguous()
            quantized |= made
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    packed.mkdir()
    save_file(quantized, packed / "model.safetensors", metadata={"format": "pt"})
    own = json.loads((plain / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**own, "quantization_config": how}))
    return plain, packed


def same_everywhere(plain, packed):
    """Every parameter of every stage and rank, at degrees 1, 2 and 4."""
    import torch

    from hocket.models.source import resolve_model
    from tests.models.test_weights import Case

    source = resolve_model(packed)
    assert "quantization_config" not in source.config
    case = Case(source.config)
    count = 0
    pairs = zip(case.everywhere(source), case.everywhere(resolve_model(plain)), strict=True)
    for (found, _), (wanted, _) in pairs:
        values = dict(wanted.named_parameters())
        for name, parameter in found.named_parameters():
            torch.testing.assert_close(parameter, values[name], rtol=1e-6, atol=1e-7)
            count += 1
    assert count


@pytest.mark.parametrize("name", CASES)
def test_every_shard_has_the_values_that_the_format_stands_for(name, tmp_path):
    quantize, how = CASES[name]
    same_everywhere(*folders(tmp_path, WIDE, quantize, how))


def test_experts_that_are_stored_one_by_one(tmp_path):
    same_everywhere(*folders(tmp_path, FAMILIES["mixtral"], *CASES["fp8"]))


def test_fp8_as_transformers_reads_it(tmp_path):
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    from hocket.models.dequantized import BlockScaled
    from hocket.models.disk_tensor import DiskTensor
    from hocket.models.weight_headers import headers

    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(64, 96, generator=draw)
    _, made = fp8("a", weight, draw)
    where = headers(_saved(tmp_path, made))
    found = BlockScaled(*(DiskTensor(where[key], key) for key in made), (16, 16)).whole()
    wanted = Fp8Dequantize(None)._dequantize_one(*made.values(), torch.float32)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_mxfp4_as_transformers_reads_it(tmp_path):
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from hocket.models.dequantized import Mxfp4
    from hocket.models.disk_tensor import DiskTensor
    from hocket.models.weight_headers import headers

    draw = torch.Generator().manual_seed(1)
    blocks = torch.randint(256, (3, 40, 2, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(110, 135, (3, 40, 2), generator=draw, dtype=torch.uint8)
    where = headers(_saved(tmp_path, {"w_blocks": blocks, "w_scales": scales}))
    one = Mxfp4(
        DiskTensor(where["w_blocks"], "w_blocks"), DiskTensor(where["w_scales"], "w_scales")
    )
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert one.shape == tuple(wanted.shape)
    torch.testing.assert_close(one.whole(), wanted, rtol=0, atol=0)
    box = (slice(1, 3), slice(5, 50), slice(7, 33))
    part = torch.empty(2, 45, 26)
    one.read(box, part)
    torch.testing.assert_close(part, wanted[box], rtol=0, atol=0)


def _saved(folder, tensors):
    from safetensors.torch import save_file

    save_file({key: t.contiguous() for key, t in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "words_"),
    [
        ({"scales": (3, 5)}, "do not fit each other"),
        ({"qzeros": None}, r"qzeros is absent"),
        ({"g_idx": 99}, "names group 99 of 4"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, change, words_):
    import torch
    from safetensors.torch import load_file, save_file

    plain, packed = folders(tmp_path, WIDE, *CASES["gptq"])
    file = packed / "model.safetensors"
    tensors = load_file(file)
    stem = "model.layers.0.self_attn.q_proj"
    for last, value in change.items():
        key = f"{stem}.{last}"
        if value is None:
            del tensors[key]
        elif isinstance(value, tuple):
            tensors[key] = torch.zeros(value, dtype=tensors[key].dtype)
        else:
            tensors[key][0] = value
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=words_):
        same_everywhere(plain, packed)


def test_an_adapter_is_not_merged_into_a_quantized_base(tmp_path):
    from hocket.models.source import resolve_model

    _, packed = folders(tmp_path, WIDE, *CASES["fp8"])
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps(
            {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": str(packed)}
        )
    )
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"whose weights are quantized \(fp8\)") as caught:
        resolve_model(adapter)
    assert "adapter_config.json" in str(caught.value.hint)
