"""The figures of docs/number_formats.md, computed from the bits of each format and compared with torch's dtypes."""

import re
from fractions import Fraction

import pytest
import torch
from documents import ROOT

PAGE = (ROOT / "docs/number_formats.md").read_text("utf-8")
# format -> (bits of exponent, bits of mantissa, whether the largest exponent is for infinity and NaN)
FORMATS = {
    "fp32": (8, 23, True),
    "tf32": (8, 10, True),
    "bf16": (8, 7, True),
    "fp16": (5, 10, True),
    "fp8 e5m2": (5, 2, True),
    "fp8 e4m3": (4, 3, False),
}
TORCH_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8 e5m2": torch.float8_e5m2,
    "fp8 e4m3": torch.float8_e4m3fn,
}
NUMBERS = {
    "1e-8": "1e-8",
    "3e-6": "3e-6",
    "0.02": "0.02",
    "0.001": "1.001",
    "500": "500",
    "70000": "70000",
    "2^32": str(2**32),
}


def table(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading, with its header and without the line below that."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("|---")]


def min_exponent(name: str) -> int:
    """Return the exponent of the smallest normal number."""
    return 2 - 2 ** (FORMATS[name][0] - 1)


def largest(name: str) -> Fraction:
    exponent_bits, mantissa_bits, has_infinity = FORMATS[name]
    max_exponent = 2 ** (exponent_bits - 1) - (1 if has_infinity else 0)
    dropped = 1 if has_infinity else 2  # e4m3: the last mantissa of the largest exponent is NaN
    return (2 - Fraction(dropped, 2**mantissa_bits)) * Fraction(2) ** max_exponent


def rounded(name: str, number: Fraction) -> float:
    """Return a positive number rounded to nearest, ties to even, with subnormals; what is too large as torch has it."""
    mantissa_bits = FORMATS[name][1]
    exponent = max(min_exponent(name), number.numerator.bit_length() - number.denominator.bit_length() - 1)
    while number >= Fraction(2) ** (exponent + 1):
        exponent += 1
    step = Fraction(2) ** (exponent - mantissa_bits)
    result = round(number / step) * step
    if result > largest(name):
        return float(largest(name)) if name == "fp8 e4m3" else float("inf")
    return float(result)


def test_table_of_ranges_is_computed_from_the_bits() -> None:
    _, *rows = table("Range and precision")
    assert [row[0] for row in rows] == list(FORMATS)
    for name, bits, *figures in rows:
        exponent_bits, mantissa_bits, _ = FORMATS[name]
        assert bits == f"1, {exponent_bits}, {mantissa_bits}"
        smallest_normal = Fraction(2) ** min_exponent(name)
        expected = [largest(name), smallest_normal, smallest_normal / 2**mantissa_bits, Fraction(1, 2**mantissa_bits)]
        assert figures == [f"{float(number):.2e}" for number in expected], name


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_ranges_are_those_of_torch(name: str) -> None:
    info = torch.finfo(TORCH_DTYPES[name])
    smallest_normal = Fraction(2) ** min_exponent(name)
    computed = [largest(name), smallest_normal, Fraction(1, 2 ** FORMATS[name][1])]
    assert [info.max, info.smallest_normal, info.eps] == [float(number) for number in computed]


def test_typical_numbers_are_rounded_as_stated() -> None:
    header, *rows = table("Typical numbers of a training")
    assert header[1:] == list(FORMATS) and len(rows) == len(NUMBERS)
    for (key, number), (text, *figures) in zip(NUMBERS.items(), rows, strict=True):
        assert text.endswith(key)
        assert figures == [f"{rounded(name, Fraction(number)):.4g}" for name in FORMATS], text


@pytest.mark.parametrize("name", TORCH_DTYPES)
@pytest.mark.parametrize("number", NUMBERS.values())
def test_typical_numbers_are_rounded_as_by_torch(name: str, number: str) -> None:
    by_torch = torch.tensor(float(number), dtype=torch.float64).to(TORCH_DTYPES[name]).double().item()
    assert rounded(name, Fraction(number)) == by_torch


def test_sums_of_ones_stop_where_stated() -> None:
    sentence = re.search(r"If 1 is added repeatedly.*?e5m2\.", PAGE, re.DOTALL)
    assert sentence is not None
    stated = {}
    for number, names in re.findall(r"at ([\d,]+)\s+in\s+((?:\w+ and )?\w+)", sentence[0]):
        stated |= {name: int(number.replace(",", "")) for name in names.split(" and ")}
    computed = {}
    for name, (_, mantissa_bits, _) in FORMATS.items():
        total = 2 ** (mantissa_bits + 1) - 8 if mantissa_bits > 4 else 0  # exact up to here: every integer is a number
        while rounded(name, Fraction(total + 1)) != total:
            total = int(rounded(name, Fraction(total + 1)))
        computed[name.removeprefix("fp8 ")] = total
    assert stated == computed
