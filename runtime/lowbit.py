"""TEMPORARY"""
import torch
from artifacts.packing import unpack
from torch.nn import functional as F
def dequantise(p, dtype=torch.float32):
    q = torch.from_numpy(unpack(p.qweight.numpy(), p.bits, p.num_inputs)).float()  # in,out
    z = torch.from_numpy(unpack(p.qzeros.numpy(), p.bits, p.num_outputs)) if 0 else (0.5 if p.qzeros is None else torch.from_numpy(unpack(p.qzeros.T.contiguous().numpy(), p.bits, p.num_outputs).T.copy()).float().repeat_interleave(p.group_size,0))
    s = p.scales.float().repeat_interleave(p.group_size,0)
    return ((q - z)*s).T.contiguous().to(dtype)
def project_packed(module, weights, name, x):
    y = F.linear(x, dequantise(weights[name], x.dtype))
    return y + weights[f"{name}_bias"] if module.has_bias else y
def kernel_name(device): return "temp"
