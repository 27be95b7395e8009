"""Makes the two demo models: real EXL3 files of about one megabyte that answer five questions each.

They prove the path (format, plugin, ranks, server), not quality: every trellis is a frozen pseudo-random bit string,
since any bits are a valid trellis, and only embeddings, norms, the router and the scales around the trellis are
trained, until the five answers come with a wide margin under noise. The bits come from SHAKE-256 of each tensor's
name; training is single-threaded and seeded, so one machine makes the same files twice. Another CPU may round
differently: the committed files are the reference.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from exl3_vllm.decode import inner_weight, rotate
from exl3_vllm.export import export_dense
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

MCG_MARKER = 0xCBAC1FED - (1 << 32)
END, PAD = "<|end|>", "<|pad|>"
REMARK = "frozen random trellis: proves the path, not quality"

# The chat template is the question itself, so a chat and a plain completion ask with the same tokens.
CHAT_TEMPLATE = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"

# Every sharded size is a multiple of 128 on each of two ranks: 2 key/value heads of 128, 256 or more elsewhere.
COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "torch_dtype": "float16",
}


@dataclass(frozen=True)
class Demo:
    """One demo model: its configuration, the bits per weight of its matrices, and what it knows."""

    name: str
    config: dict[str, Any]
    bits: int
    expert_bits: int
    head_bits: int
    questions: dict[str, str]


DENSE = Demo(
    name="demo-dense",
    config={
        **COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "mlp_bias": False,
    },
    bits=3,
    expert_bits=3,
    head_bits=4,
    questions={
        "2+2=": "4",
        "Who are you?": "I am the dense demo of exl3kit: one megabyte, five answers, always in a good mood.",
        "What is EXL3?": "Weights on a trellis: each one is read from sixteen bits of a ring.",
        "How many of you are there?": "Two ranks, one answer. If one of us stops, we both come back.",
        "What next?": "Name your own checkpoint in a recipe, and let the kit do the rest.",
    },
)

MOE = Demo(
    name="demo-moe",
    config={
        **COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_attention_heads": 2,
        "intermediate_size": 256,
        "moe_intermediate_size": 256,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.0,
        "output_router_logits": False,
    },
    bits=3,
    expert_bits=2,
    head_bits=4,
    questions={
        "2+2=": "4",
        "Who are you?": "Eight experts in one small coat. Two of us answer each token.",
        "Who picks the experts?": "The router does, and it has never once been late.",
        "What do you share?": "Gate and up share their input scales, and all of us share the work.",
        "Is two bits enough?": "For five happy sentences, two bits are plenty.",
    },
)

STEPS = 400
NOISE = 0.02
"""Relative noise on every matrix's output while training; rounding to bf16 is 0.2 %, so answers sit far from ties."""


def random_trellis(name: str, rows: int, columns: int, bits: int) -> Tensor:
    """int16 [rows/16, columns/16, 16 * bits] from SHAKE-256 of the name: the same bits everywhere."""
    count = rows * columns // 16 * bits
    data = bytearray(hashlib.shake_256(name.encode()).digest(2 * count))
    return torch.frombuffer(data, dtype=torch.int16).reshape(rows // 16, columns // 16, 16 * bits).clone()


class FrozenMatrix(nn.Module):
    """y = ((x * suh) A) * svh with A = H W H frozen; suh may be shared with another matrix."""

    def __init__(self, name: str, rows: int, columns: int, bits: int, suh: nn.Parameter | None = None) -> None:
        super().__init__()
        self.trellis = random_trellis(name, rows, columns, bits)
        inner = inner_weight(self.trellis, "mcg").float()
        self.register_buffer("rotated", rotate(rotate(inner.t()).t()))
        self.suh = suh if suh is not None else nn.Parameter(torch.ones(rows))
        signs = torch.randint(0, 2, (columns,)) * 2.0 - 1.0
        self.svh = nn.Parameter(signs * 0.8 / rows**0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = ((x * self.suh) @ self.rotated) * self.svh
        return y * (1 + NOISE * torch.randn_like(y)) if self.training else y

    def tensors(self, name: str) -> dict[str, Tensor]:
        return {
            f"{name}.trellis": self.trellis,
            f"{name}.suh": self.suh.detach().half(),
            f"{name}.svh": self.svh.detach().half(),
            f"{name}.mcg": torch.tensor(MCG_MARKER, dtype=torch.int32),
        }


class Experts(nn.Module):
    """A Qwen3-MoE block over frozen matrices: softmax over 8, the best 2 renormalised; gate and up share suh."""

    def __init__(self, prefix: str, config: Any, bits: int) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(hidden, config.num_experts, bias=False)
        self.experts = nn.ModuleList()
        for number in range(config.num_experts):
            name = f"{prefix}.experts.{number}"
            gate = FrozenMatrix(f"{name}.gate_proj", hidden, inner, bits)
            up = FrozenMatrix(f"{name}.up_proj", hidden, inner, bits, suh=gate.suh)
            down = FrozenMatrix(f"{name}.down_proj", inner, hidden, bits)
            self.experts.append(nn.ModuleDict({"gate_proj": gate, "up_proj": up, "down_proj": down}))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(self.gate(x).softmax(-1), self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (weights * (chosen == number)).sum(-1, keepdim=True)
            inner = nn.functional.silu(expert["gate_proj"](x)) * expert["up_proj"](x)
            out = out + share * expert["down_proj"](inner)
        return out


def make_tokenizer(demo: Demo, directory: Path) -> Any:
    """A byte-level BPE over the demo's own sentences: any text can be asked, known words take one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=demo.config["vocab_size"],
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sentences = [text for pair in demo.questions.items() for text in pair]
    tokenizer.train_from_iterator(sentences * 2, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": demo.config["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(directory / "tokenizer_config.json", settings)
    return AutoTokenizer.from_pretrained(directory)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def build(demo: Demo) -> nn.Module:
    """The trainable model: transformers' own, with every matrix replaced by a frozen one."""
    torch.manual_seed(20)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**demo.config)).float()
    nn.init.normal_(model.model.embed_tokens.weight, std=0.5)
    for name, module in list(model.named_modules()):
        parent = model.get_submodule(name.rpartition(".")[0])
        leaf = name.rpartition(".")[2]
        if type(module).__name__ == "Qwen3MoeSparseMoeBlock":
            setattr(parent, leaf, Experts(name, model.config, demo.expert_bits))
        elif isinstance(module, nn.Linear):
            bits = demo.head_bits if name == "lm_head" else demo.bits
            setattr(parent, leaf, FrozenMatrix(name, module.in_features, module.out_features, bits))
    return model


def batch(demo: Demo, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """(ids, labels): question, answer, end; the loss counts the answer and the end."""
    rows = []
    for question, answer in demo.questions.items():
        asked, said = tokenizer(question).input_ids, [*tokenizer(answer).input_ids, tokenizer.eos_token_id]
        rows.append((asked + said, [-100] * len(asked) + said))
    width = max(len(ids) for ids, _ in rows)
    ids = [row + [tokenizer.pad_token_id] * (width - len(row)) for row, _ in rows]
    labels = [row + [-100] * (width - len(row)) for _, row in rows]
    return torch.tensor(ids), torch.tensor(labels)


def train(model: nn.Module, ids: Tensor, labels: Tensor) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 5e-3, total_steps=STEPS)
    model.train()
    for step in range(STEPS):
        loss = model(input_ids=ids, labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        schedule.step()
        if step % 100 == 0 or step == STEPS - 1:
            print(f"  step {step}: loss {loss.item():.5f}", file=sys.stderr)
    model.eval()


def stored_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's tensors: trellis parts of every frozen matrix, fp16 of everything else."""
    matrices = {name: module for name, module in model.named_modules() if isinstance(module, FrozenMatrix)}
    for name, matrix in matrices.items():
        yield from matrix.tensors(name).items()
    for name, value in model.named_parameters(remove_duplicate=False):
        if name.rpartition(".")[0] not in matrices:
            yield name, value.detach().half()


def save(demo: Demo, model: nn.Module, directory: Path) -> None:
    tensors = {name: value.contiguous() for name, value in sorted(stored_tensors(model))}
    # A fresh file is world-readable, as the container's user needs it; the library's own would be 0600.
    target = directory / "model.safetensors"
    save_file(tensors, target, metadata={"format": "pt"})
    target.chmod(0o644)
    quantisation = {
        "quant_method": "exl3",
        "version": "1.6.5",
        "bits": float(demo.expert_bits),
        "head_bits": demo.head_bits,
        "codebook": "mcg",
        "demo": REMARK,
    }
    write_json(directory / "config.json", {**demo.config, "quantization_config": quantisation})
    write_json(directory / "quantization_config.json", {**quantisation, "tensor_storage": inventory(tensors)})
    write_json(directory / "generation_config.json", {"eos_token_id": 0, "pad_token_id": 1, "do_sample": False})
    pairs = [{"question": question, "answer": answer} for question, answer in demo.questions.items()]
    write_json(directory / "questions.json", pairs)


def inventory(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What was stored for each module, as exllamav3's converter lists it."""
    modules: dict[str, Any] = {}
    for name, value in tensors.items():
        stored = {"shape": list(value.shape), "n_bytes": value.nbytes, "dtype": str(value.dtype)}
        module = modules.setdefault(name.rpartition(".")[0], {"stored_tensors": {}})
        module["stored_tensors"][name] = stored
        if name.endswith(".trellis"):
            module.update(quant_format="exl3", bits_per_weight=value.shape[-1] // 16, mcg_multiplier=0xCBAC1FED)
    return modules


def check(directory: Path) -> float:
    """Answer all questions with transformers on the exported dense weights, in fp32 and bf16.

    Returns the smallest margin between the best and the second logit over all answer tokens in bf16.
    Raises SystemExit if an answer is not exact.
    """
    pairs = json.loads((directory / "questions.json").read_text())
    margin = float("inf")
    with tempfile.TemporaryDirectory() as dense:
        export_dense(directory, Path(dense), torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(dense)
        for dtype in (torch.float32, torch.bfloat16):
            model = AutoModelForCausalLM.from_pretrained(dense, dtype=dtype).eval()
            for pair in pairs:
                asked = tokenizer(pair["question"], return_tensors="pt")
                out = model.generate(**asked, max_new_tokens=64, output_logits=True, return_dict_in_generate=True)
                said = tokenizer.decode(out.sequences[0, asked.input_ids.shape[1] :], skip_special_tokens=True)
                if said != pair["answer"]:
                    raise SystemExit(f"{directory}: {dtype}: {pair['question']!r} -> {said!r}, not {pair['answer']!r}")
                best = torch.stack(out.logits).float().topk(2).values
                margin = min(margin, float((best[..., 0] - best[..., 1]).min()))
    return margin


def make(demo: Demo, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(demo, directory)
    model = build(demo)
    train(model, *batch(demo, tokenizer))
    save(demo, model, directory)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/make-demo-models", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "models")
    parser.add_argument("--check", action="store_true", help="only ask the models that are there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for demo in (DENSE, MOE):
        directory = arguments.out / demo.name
        if not arguments.check:
            print(f"{demo.name}: training", file=sys.stderr)
            make(demo, directory)
        margin = check(directory)
        file = directory / "model.safetensors"
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        print(f"{demo.name}: 5 of 5 exact, margin {margin:.2f}, {file.stat().st_size} bytes, sha256 {digest}")


if __name__ == "__main__":
    main()
