helm upgrade -i nvdp nvdp/nvidia-device-plugin --set migStrategy=mixed
kubectl label node x nvidia.com/device-plugin.config=t4
