# https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/gpu-sharing.html: helm install with a ConfigMap
# Licence: Apache-2.0, Copyright NVIDIA CORPORATION.
helm install gpu-operator nvidia/gpu-operator \
    -n gpu-operator \
    --version=v25.3.4 \
    --set devicePlugin.config.name=time-slicing-config
