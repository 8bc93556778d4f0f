"""Fourier transforms of all kinds of lengths and normalisations against ATen's, and training of a spectral layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import irongrad as ig
from irongrad.operators.decompositions.fft import fft_c2c, fft_c2r, fft_r2c, transform
from irongrad.operators.decompositions.pairs import Pair

aten = torch.ops.aten

# One product; a split; nested splits; a prime as one product; primes as convolutions, alone and within a split.
LENGTHS = (1, 2, 3, 32, 31, 33, 48, 64, 97, 360, 1024, 127, 131, 262, 4099)


def pair_of(z: Tensor) -> Pair:
    return Pair(z.real.clone(), z.imag.clone())


def complex_of(z: Pair) -> Tensor:
    return torch.complex(z.re, z.im)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("forward", [True, False])
def test_transforms_of_every_length_match_aten(n: int, forward: bool) -> None:
    torch.manual_seed(n)
    z = torch.randn(3, n, dtype=torch.complex128)
    expected = aten._fft_c2c(z, [1], 0, forward)
    found = complex_of(transform(pair_of(z), -1 if forward else 1))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12 * n**0.5)


@pytest.mark.parametrize("n", LENGTHS)
def test_single_precision_is_as_accurate_as_eager(n: int) -> None:
    torch.manual_seed(n)
    z = torch.randn(16, n, dtype=torch.complex64)
    exact = torch.fft.fft(z.to(torch.complex128))
    error = (complex_of(transform(pair_of(z), -1)) - exact).abs().max()
    eager = (torch.fft.fft(z) - exact).abs().max()
    assert error <= 4 * eager + 16 * torch.finfo(torch.float32).eps * exact.abs().max()


@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    normalization=st.integers(0, 2),
    onesided=st.booleans(),
    data=st.data(),
)
def test_real_and_complex_transforms_match_aten(
    shape: list[int], normalization: int, onesided: bool, data: st.DataObject
) -> None:
    dims = data.draw(st.permutations(range(len(shape))))[: data.draw(st.integers(1, len(shape)))]
    x = torch.randn(shape, dtype=torch.float64)
    expected = aten._fft_r2c(x, dims, normalization, onesided)
    torch.testing.assert_close(complex_of(fft_r2c(x, dims, normalization, onesided)), expected)
    z = torch.randn(aten._fft_r2c(x, dims, 0, True).shape, dtype=torch.complex128)
    size = x.shape[dims[-1]]
    torch.testing.assert_close(
        fft_c2r(pair_of(z), dims, normalization, size), aten._fft_c2r(z, dims, normalization, size)
    )
    whole = torch.randn(shape, dtype=torch.complex128)
    found = complex_of(fft_c2c(pair_of(whole), dims, normalization, onesided))
    torch.testing.assert_close(found, aten._fft_c2c(whole, dims, normalization, onesided))


@pytest.mark.parametrize("n", [6, 33, 36, 131])
def test_gradients_match_finite_differences(n: int) -> None:
    """The transform is linear; autograd differentiates its steps, and gradcheck checks all of them together."""
    re, im = (torch.randn(2, n, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def parts(re: Tensor, im: Tensor) -> tuple[Tensor, Tensor]:
        z = transform(Pair(re, im), -1)
        return z.re, z.im

    assert torch.autograd.gradcheck(parts, (re, im), fast_mode=True)


def test_compiled_transforms_and_their_gradients_match_eager() -> None:
    """One function with long, short, prime, real, padded, truncated and short-time transforms, and shifts."""
    torch.manual_seed(0)

    def spectra(x: Tensor, y: Tensor) -> Tensor:
        window = torch.hann_window(16, dtype=x.dtype)
        short = torch.stft(x, 16, 4, window=window, return_complex=True)
        power = short.abs().square().mean() + torch.fft.rfft(x, norm="ortho").abs().sum()
        planes = torch.fft.fftshift(torch.fft.rfft2(y, s=(4, 8)), dim=-2)
        back = torch.fft.irfftn(torch.fft.fftn(y)[..., :3], s=(5, 4), dim=(0, 2))
        return power + planes.real.square().sum() + (back * y[..., :4]).sum() + torch.fft.hfft(y, n=131).cos().mean()

    ig.compile_function(spectra, (torch.randn(2, 96), torch.randn(5, 6, 7)), gradients=True)


class SpectralConvolution(nn.Module):
    """Li et al., "Fourier neural operator for parametric partial differential equations" (2021), in one dimension."""

    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, channels, modes, 2) / channels)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x, norm="ortho")
        modes = self.weight.shape[2]
        low = torch.einsum("bim,iom->bom", spectrum[..., :modes], torch.view_as_complex(self.weight))
        filtered = torch.zeros_like(spectrum)
        filtered[..., :modes] = low
        return x + torch.tanh(torch.fft.irfft(filtered, n=x.shape[-1], norm="ortho"))


def test_a_spectral_layer_is_trained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 4, 1), SpectralConvolution(4, 5), nn.Conv1d(4, 1, 1))
    x = torch.randn(3, 1, 40)
    step = ig.TrainStep(model, nn.MSELoss(), torch.optim.AdamW(model.parameters(), 1e-2), {"x": x, "y": x.cumsum(2)})
    artifact = ig.compile(step, tmp_path / "artifact", entry_points=("train_step",))
    assert all(c.error <= c.allowed for c in artifact.reports["llvm-cpu"].comparisons)
