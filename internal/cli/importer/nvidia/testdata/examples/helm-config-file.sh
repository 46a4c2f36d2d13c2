# https://github.com/NVIDIA/k8s-device-plugin/blob/v0.17.1/README.md#single-config-file-example (the file is beside this one)
# Licence: Apache-2.0, Copyright NVIDIA CORPORATION.
helm upgrade -i nvdp nvdp/nvidia-device-plugin \
  --version=0.17.1 \
  --namespace nvidia-device-plugin \
  --create-namespace \
  --set-file config.map.config=readme-file.yaml
