"""Number formats for experts, and banks of packed experts.

>>> import torch
>>> bank = ExpertBank.pack(TensorSource([[{"up_proj": torch.randn(16, 128)}]]), "qint4")
>>> bank.name
'qint4 group 128'
"""

from specter_lab.quantize.bank import ExpertBank
from specter_lab.quantize.exact import narrowest_exact_dtype
from specter_lab.quantize.formats import Dense, Format, Quanto, format_named
from specter_lab.quantize.layout import BlobLayout
from specter_lab.quantize.mxfp4 import Mxfp4, Mxfp4Tensor
from specter_lab.quantize.source import ExpertSource, TensorSource
from specter_lab.quantize.tinygemm import tinygemm_path
from specter_lab.quantize.unpack import unpack_path

__all__ = [
    "BlobLayout",
    "Dense",
    "ExpertBank",
    "ExpertSource",
    "Format",
    "Mxfp4",
    "Mxfp4Tensor",
    "Quanto",
    "TensorSource",
    "format_named",
    "narrowest_exact_dtype",
    "tinygemm_path",
    "unpack_path",
]
