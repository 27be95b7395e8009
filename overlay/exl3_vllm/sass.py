"""What a trellis kernel costs per weight, counted in its machine code, and how many of its CTAs fit on an SM.

No GPU is needed: `cuobjdump` disassembles, and the pipeline loop of a kernel is the innermost loop that issues tensor
instructions. Every weight costs exactly one 32-bit multiplication by its codebook's constant, so counting those counts
the weights.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# The constants of each codebook's multiplication, as the format defines them; an instruction has room for one.
CONSTANTS = {"3inst": (89226354, 64248484), "mcg": (0xCBAC1FED,), "mul1": (0x83DCD12D,)}

# What turns trellis bits into fp16 fragments: fetch, shift, select, mask, add; multiplications are counted apart, since
# addresses need some too. All else in the loop (tensor instructions, their A operand, copies of the next stage,
# barriers, loop control) is paid per tile, not per weight.
DECODE = frozenset(("LDS", "SHF", "PRMT", "LOP3", "IDP", "HADD2", "HFMA2", "HMUL2", "I2F", "I2FP", "SGXT"))

_FUNCTION = re.compile(r"^\s*Function : (\S+)")
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)(\S*)\s*(.*?)\s*;")
_ADDRESS = re.compile(r"0x([0-9a-f]+)$")
_CONSTANT = re.compile(r"(-?)0x([0-9a-f]+)")


@dataclass(frozen=True)
class Instruction:
    """One machine instruction: byte address in its kernel, opcode and its modifiers, operands as printed."""

    address: int
    opcode: str
    modifiers: str
    operands: str

    @property
    def moves(self) -> bool:
        """Whether it is a move or shift that the compiler wrote as a multiplication, to use an idle pipe."""
        return self.opcode == "IMAD" and self.modifiers.startswith((".MOV", ".SHL"))

    def multiplies_with(self, constants: tuple[int, ...]) -> bool:
        """Whether it is a 32-bit multiplication (and addition) with one of ``constants``, printed with either sign."""
        if self.opcode != "IMAD":
            return False
        printed = (-int(digits, 16) if sign else int(digits, 16) for sign, digits in _CONSTANT.findall(self.operands))
        return any(value & 0xFFFFFFFF in constants for value in printed)


@dataclass(frozen=True)
class LoopCost:
    """One pipeline loop: weights that a thread decodes per turn, instructions spent on them, and all of the loop's."""

    weights: int
    decode: int
    total: int
    tensor: int
    opcodes: dict[str, int]

    @property
    def decode_per_weight(self) -> float:
        return self.decode / self.weights


def disassemble(file: Path, cuobjdump: Path, target: str) -> str:
    """SASS of every kernel of ``file`` for ``target`` ("12.0"); nvdisasm must lie beside cuobjdump."""
    argv = [str(cuobjdump), "-sass", "-arch", f"sm_{target.replace('.', '')}", str(file)]
    environment = {"PATH": f"{cuobjdump.parent}:/usr/bin:/bin"}
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env=environment)
    return done.stdout


def kernels(sass: str) -> Iterator[tuple[str, list[Instruction]]]:
    """(mangled name, instructions) of each kernel in a disassembly, read line by line: a library's is 100 MB."""
    name, body = "", list[Instruction]()
    for line in sass.splitlines():
        if found := _FUNCTION.match(line):
            if body:
                yield name, body
            name, body = found[1], []
        elif found := _INSTRUCTION.match(line):
            body.append(Instruction(int(found[1], 16), found[2], found[3], found[4]))
    if body:
        yield name, body


def pipeline_loops(body: list[Instruction]) -> list[list[Instruction]]:
    """The innermost loops with tensor instructions, one for each number of row blocks that a kernel is written for."""
    found: list[tuple[int, int]] = []
    for instruction in body:
        target = _ADDRESS.search(instruction.operands)
        if instruction.opcode == "BRA" and target and int(target[1], 16) < instruction.address:
            found.append((int(target[1], 16), instruction.address))
    inner = [span for span in set(found) if not any(_within(other, span) for other in found if other != span)]
    loops = [[i for i in body if low <= i.address <= high] for low, high in sorted(inner)]
    return [loop for loop in loops if any(instruction.opcode == "HMMA" for instruction in loop)]


def _within(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def cost(loop: list[Instruction], codebook: str) -> LoopCost:
    """What a pipeline loop costs. Raises ValueError if no multiplication of the codebook is in it."""
    opcodes = Counter(instruction.opcode for instruction in loop)
    weights = sum(instruction.multiplies_with(CONSTANTS[codebook]) for instruction in loop)
    if not weights:
        raise ValueError(f"no multiplication with a constant of {codebook} in a loop of {len(loop)} instructions")
    decode = weights + sum(instruction.opcode in DECODE or instruction.moves for instruction in loop)
    return LoopCost(weights, decode, len(loop), opcodes["HMMA"], dict(opcodes))


@dataclass(frozen=True)
class Sm:
    """What one multiprocessor has to share among CTAs. Source: CUDA C++ Programming Guide, "Compute Capabilities"."""

    registers: int
    shared: int
    threads: int
    block_overhead: int = 1024  # bytes of shared memory that the system keeps per CTA


SMS = {"9.0": Sm(65536, 228 * 1024, 2048), "12.0": Sm(65536, 100 * 1024, 1536), "12.1": Sm(65536, 100 * 1024, 1536)}


def ctas_per_sm(target: str, *, registers: int, threads: int, shared: int) -> int:
    """CTAs that fit on an SM of ``target``: ``registers`` per thread, ``threads`` and ``shared`` bytes per CTA.

    Registers are handed out per warp in units of 256, so per thread in units of 8.
    """
    sm = SMS[target]
    by_registers = sm.registers // (-(-registers // 8) * 8 * threads)
    return min(by_registers, sm.shared // (shared + sm.block_overhead), sm.threads // threads)


def worst(loops: Iterable[LoopCost]) -> LoopCost:
    """The loop that spends most per weight."""
    return max(loops, key=lambda loop: loop.decode_per_weight)
