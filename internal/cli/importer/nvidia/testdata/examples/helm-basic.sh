# https://github.com/NVIDIA/k8s-device-plugin/blob/v0.17.1/README.md#deployment-via-helm
# Licence: Apache-2.0, Copyright NVIDIA CORPORATION.
helm repo add nvdp https://nvidia.github.io/k8s-device-plugin
helm repo update
helm upgrade -i nvdp nvdp/nvidia-device-plugin \
  --namespace nvidia-device-plugin \
  --create-namespace \
  --version 0.17.1
