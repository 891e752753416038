"""`penstock bench quantization`: what int8 costs in exactness and gains in speed."""
