"""Figures of *Context-Aware MoE Inference on CXL-Enabled GPU-NDP Systems* (2025), each with where
it is printed.

Figures 2 to 6 are pictures: this module has only what the text says of them. Lengths, batch size,
link rate, where prompts run, and what the compared MoNDE keeps on the GPU and how often it swaps
are not printed at all.
"""

from dataclasses import dataclass

SMALL = "mixtral-8x7b"
LARGE = "mixtral-8x22b"
MODELS_MEASURED = (SMALL, LARGE)
BITS = (3, 2)


@dataclass(frozen=True, slots=True)
class Printed:
    """A printed figure, or the ends of a printed range, and where it stands."""

    where: str
    low: float
    high: float

    @classmethod
    def at(cls, where: str, value: float) -> "Printed":
        return cls(where, value, value)

    def __str__(self) -> str:
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"


# Section 5.1: hot experts a layer on the GPU, of eight.
HOT = {SMALL: 4, LARGE: 2}

# Table 1: billions of parameters in experts, and in all.
PARAMETERS = {SMALL: (45.1, 46.7), LARGE: (135.5, 140.6)}
# Section 1: GB of Mixtral-8x22B in FP16, approximately; the share of a block's time that bringing
# an expert can exceed.
LARGE_GB = Printed.at("1", 280)
LOADING_SHARE = Printed.at("1, after DAOP", 0.90)
# Section 3.2, Figure 4: cosine of expert use in prefill and decoding, mean over layers,
# Mixtral-8x7B on TruthfulQA.
COSINE = Printed.at("3.2, Figure 4", 0.89)

# Section 5.2 by model and average bits, over MoNDE on the same system.
END_TO_END = {
    (SMALL, 3): Printed("5.2, Figure 5", 6.6, 8.3),
    (SMALL, 2): Printed("5.2, Figure 5", 7.9, 10.6),
    (LARGE, 3): Printed("5.2, Figure 5", 7.6, 8.7),
    (LARGE, 2): Printed("5.2, Figure 5", 9.5, 11.2),
}
DECODING = {
    (SMALL, 3): Printed.at("5.2, Figure 6", 8.7),
    (SMALL, 2): Printed.at("5.2, Figure 6", 11.2),
    (LARGE, 3): Printed.at("5.2, Figure 6", 8.9),
    (LARGE, 2): Printed.at("5.2, Figure 6", 11.5),
}
NDP_SIDE = {
    (model, bits): Printed.at("5.2, Figure 5", about)
    for model in (SMALL, LARGE)
    for bits, about in ((3, 5), (2, 8))
}
# Section 5.2: over HOBBIT end to end, at 2 bits, at most.
OVER_HOBBIT = {SMALL: Printed.at("5.2, Figure 5", 18), LARGE: Printed.at("5.2, Figure 5", 19)}
# The abstract's decoding throughput over the state of the art, "up to".
ABSTRACT = Printed.at("abstract, 7", 8.7)

# Table 3, Mixtral-8x7B, four experts a layer in FP16: per cent of eight tasks, and the printed
# average.
TABLE_3 = {
    "original": ((68.02, 42.48, 64.87, 84.05, 56.83, 85.35, 76.24, 82.43), 70.03),
    "3 bits, no selector": ((67.12, 42.88, 64.34, 83.37, 55.46, 85.02, 76.87, 82.64), 69.71),
    "3 bits": ((66.72, 42.81, 64.08, 83.82, 55.70, 85.57, 77.38, 83.12), 69.90),
    "2 bits, no selector": ((56.64, 34.41, 59.11, 79.16, 50.00, 78.75, 70.95, 78.78), 63.48),
    "2 bits": ((63.31, 40.46, 60.07, 81.35, 53.66, 81.77, 73.09, 79.76), 66.68),
}
TASKS = ("MMLU", "MathQA", "HellaSwag", "ARC-E", "ARC-C", "BoolQ", "WinoGrande", "PIQA")
# Sections 5.3 and 7: the average drop in points by bits, and what the selector gains at 2 bits
# ("slight" at 3).
DROP = {3: Printed.at("abstract, 5.3", 0.13), 2: Printed.at("5.3", 3.4)}
SELECTOR_GAIN = Printed.at("5.3", 3.2)
