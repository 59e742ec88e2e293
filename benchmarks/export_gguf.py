"""Writes the packaged GGUF file again with every matrix in bfloat16, so that llama.cpp runs the weights that Shoal runs.

`python -m benchmarks.export_gguf smollm2-135m FILE`. Metadata and norms are copied as they are.
"""

import sys
from pathlib import Path

import gguf
import numpy as np

from shoal.errors import InvalidConfig
from shoal.model_files import FileFormat, open_model


def export(name_or_path: str, target: Path) -> Path:
    """The new file. Raises InvalidConfig for a model that is no GGUF file."""
    model = open_model(name_or_path)
    if model.format is not FileFormat.GGUF:
        raise InvalidConfig(f"{name_or_path} is no GGUF file; llama.cpp's own converter takes Hugging Face folders")
    reader = gguf.GGUFReader(model.path)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        writer.add_key_value(field.name, field.contents(), kind, field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim < 2:
            writer.add_tensor(tensor.name, values)
        else:
            data = gguf.quantize(np.ascontiguousarray(values), gguf.GGMLQuantizationType.BF16)
            writer.add_tensor(tensor.name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    target.parent.mkdir(parents=True, exist_ok=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


if __name__ == "__main__":
    print(export(sys.argv[1], Path(sys.argv[2])))
