"""BuddyMoE's figures, by table and section of the paper (arXiv:2511.10054): facts only."""

from dataclasses import dataclass

SHARES = (0.75, 0.5, 0.375)  # section 5.1: cache rates, the share of experts in GPU memory
TABLES = dict(zip(SHARES, ("Table 2", "Table 3", "Table 4"), strict=True))


@dataclass(frozen=True, slots=True)
class Row:
    """A row of Tables 2 to 4: DeepSeek-V2-Lite on an A100. `threshold` is the share of
    co-activation that lists cover, `buddies` their longest, `rho` the limit of replacements a
    token; `accuracy` is the mean of ARC-Easy and ARC-Challenge. None: not printed."""

    share: float
    method: str
    accuracy: float | None
    tokens_per_s: float | None
    threshold: float | None = None
    buddies: int | None = None
    rho: int | None = None

    @property
    def name(self) -> str:
        if self.buddies is None:
            return self.method
        limit = "no rho" if self.rho is None else f"rho {self.rho}"
        return f"threshold {self.threshold:g}, {self.buddies} buddies, {limit}"


ORIGINAL = "original"
RANDOM = "random"
BUDDIES = "buddies"
ROWS = (
    Row(0.75, ORIGINAL, 0.735, 34.23),
    Row(0.75, RANDOM, 0.55, 39.67),
    Row(0.75, BUDDIES, 0.64, 37.42, 0.75, 4),
    Row(0.75, BUDDIES, 0.525, 37.12, 0.95, 16),
    Row(0.75, BUDDIES, 0.695, 36.75, 0.95, 16, 3),
    Row(0.75, BUDDIES, 0.54, 38.50, 0.95, 16, 4),
    Row(0.5, ORIGINAL, None, 28.56),
    Row(0.5, RANDOM, 0.23, 33.14),
    Row(0.5, BUDDIES, 0.53, 28.95, 0.99, 2),
    Row(0.5, BUDDIES, 0.30, 31.87, 0.95, 16),
    Row(0.5, BUDDIES, 0.635, 30.21, 0.95, 16, 3),
    Row(0.5, BUDDIES, 0.55, 31.02, 0.95, 16, 4),
    Row(0.375, ORIGINAL, None, 24.78),
    Row(0.375, RANDOM, 0.16, None),
    Row(0.375, BUDDIES, 0.175, 30.22, 0.95, 16),
    Row(0.375, BUDDIES, 0.645, 27.33, 0.95, 16, 3),
    Row(0.375, BUDDIES, 0.51, 27.46, 0.95, 16, 4),
)
# section 5.2, of rho 3: accuracy over another row's, and throughput over the original's, less 1
TEXT_ACCURACY = {(0.75, ORIGINAL): -0.054, (0.75, RANDOM): 0.264, (0.5, RANDOM): 1.76}
TEXT_GAINS = {0.75: 0.074, 0.375: 0.103}
# section 5.3 and Figure 8: bytes over PCIe of the original over those with buddies, less 1, about
MORE_READS = 0.20


def original_ms() -> dict[float, float]:
    """Milliseconds a token of the original, by share."""
    return {
        row.share: 1e3 / row.tokens_per_s
        for row in ROWS
        if row.method == ORIGINAL and row.tokens_per_s
    }
