# https://github.com/NVIDIA/k8s-device-plugin/blob/main/SHARED_GPU_TUTORIAL.md: a value that no chart has had
# Licence: Apache-2.0, Copyright NVIDIA CORPORATION.
helm install nvidia-exclusive deployments/helm/nvidia-device-plugin --set nodeSelector='gpu-node-type=shared' --set resourceConfig='gpu:sharedgpu:4'
