# https://github.com/NVIDIA/k8s-device-plugin/blob/v0.17.1/README.md#multiple-config-file-example (the files are beside this one)
# Licence: Apache-2.0, Copyright NVIDIA CORPORATION.
helm upgrade -i nvdp nvdp/nvidia-device-plugin \
  --version=0.17.1 \
  --namespace nvidia-device-plugin \
  --create-namespace \
  --set config.default=config0 \
  --set-file config.map.config0=readme-file.yaml \
  --set-file config.map.config1=readme-config1.yaml
