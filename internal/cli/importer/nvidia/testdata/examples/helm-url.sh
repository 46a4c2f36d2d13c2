# https://github.com/NVIDIA/k8s-device-plugin/blob/v0.17.1/README.md#deploying-via-helm-install-with-a-direct-url-to-the-helm-package
# Licence: Apache-2.0, Copyright NVIDIA CORPORATION.
helm upgrade -i nvdp \
  --namespace nvidia-device-plugin \
  --create-namespace \
  https://nvidia.github.io/k8s-device-plugin/stable/nvidia-device-plugin-0.17.1.tgz
