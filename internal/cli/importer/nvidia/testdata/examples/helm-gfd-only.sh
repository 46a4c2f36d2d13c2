# https://github.com/NVIDIA/k8s-device-plugin/blob/v0.17.1/README.md#deploying-gpu-feature-discovery-in-standalone-mode
# Licence: Apache-2.0, Copyright NVIDIA CORPORATION.
helm upgrade -i nvdp nvdp/nvidia-device-plugin \
    --version=0.17.1 \
    --set allowDefaultNamespace=true \
    --set nfd.enabled=false \
    --set migStrategy=mixed \
    --set devicePlugin.enabled=false
