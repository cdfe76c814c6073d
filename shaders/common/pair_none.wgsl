// Text `pair`: the tensor holds no 16-bit numbers.
