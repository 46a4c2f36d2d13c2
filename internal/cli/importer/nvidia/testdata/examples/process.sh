# https://github.com/NVIDIA/k8s-device-plugin/blob/v0.17.1/README.md#without-docker
# Licence: Apache-2.0, Copyright NVIDIA CORPORATION.
./k8s-device-plugin --pass-device-specs
