MIG_STRATEGY=mixed DEVICE_ID_STRATEGY=index nvidia-device-plugin --gds-enabled --config-file /etc/c.yaml
