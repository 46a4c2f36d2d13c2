# https://github.com/NVIDIA/k8s-device-plugin/blob/v0.17.1/README.md#with-docker
# Licence: Apache-2.0, Copyright NVIDIA CORPORATION.
docker run \
  -it \
  --privileged \
  --network=none \
  -v /var/lib/kubelet/device-plugins:/var/lib/kubelet/device-plugins \
  nvcr.io/nvidia/k8s-device-plugin:devel --pass-device-specs
