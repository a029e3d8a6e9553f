"""torch has one thread for a few tokens, and as many as before for all else and afterwards."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from runtime.kernels.cpu.decoder.quiet_torch import QuietTorch
from runtime.kernels.cpu.dense import MOST_TOKENS

SEVERAL = 3


class Model(nn.Module):
    """A model that gives torch's number of threads, or raises."""

    error: BaseException | None = None

    def forward(self, input_ids: torch.Tensor) -> int:
        if self.error:
            raise self.error
        return torch.get_num_threads()


@pytest.fixture
def model() -> Iterator[Model]:
    before = torch.get_num_threads()
    model = Model()
    torch.set_num_threads(SEVERAL)
    quiet = QuietTorch(model)
    quiet.install()
    yield model
    quiet.uninstall()
    assert torch.get_num_threads() == SEVERAL
    assert model(torch.zeros(1, 1)) == SEVERAL
    torch.set_num_threads(before)


def test_a_few_tokens_are_computed_on_one_thread_and_others_on_several(model: Model) -> None:
    for count, num_threads in ((1, 1), (MOST_TOKENS + 1, SEVERAL), (MOST_TOKENS, 1)):
        assert model(input_ids=torch.zeros(1, count)) == model(torch.zeros(1, count)) == num_threads
        assert torch.get_num_threads() == SEVERAL


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt()])
def test_after_a_pass_that_fails_torch_has_its_threads_again(
    model: Model, error: BaseException
) -> None:
    model.error = error
    with pytest.raises(type(error)):
        model(torch.zeros(1, 1))
    model.error = None
    assert model(torch.zeros(1, MOST_TOKENS + 1)) == SEVERAL
