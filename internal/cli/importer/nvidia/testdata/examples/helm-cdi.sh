# https://github.com/NVIDIA/k8s-device-plugin/blob/main/docs/cdi.md: its three --set in one command
# Licence: Apache-2.0, Copyright NVIDIA CORPORATION.
helm upgrade -i nvdp nvdp/nvidia-device-plugin \
  --set runtimeClassName=nvidia \
  --set nvidiaDriverRoot=/ \
  --set deviceListStrategy=cdi-annotations
