{{/* The environment of the agent, as JSON {"env": [...]}. */}}
{{- define "tandem.env" -}}
{{- $v := .pool.values -}}
{{- $d := .derived -}}
{{- $h := .root.Values.handOver -}}
{{- $env := list -}}
{{- $env = append $env (dict "name" "NVIDIA_VISIBLE_DEVICES" "value" "all") -}}
{{- $env = append $env (dict "name" "NVIDIA_DRIVER_CAPABILITIES" "value" (default (ternary "compute,utility" "utility" $d.prove) $v.nvidiaDriverCapabilities)) -}}
{{- $env = append $env (dict "name" "NVIDIA_DRIVER_ROOT" "value" $d.driverRoot) -}}
{{- $optional := dict
  "API" (ternary "dra" "" (and $d.dra (or (not .pool.byLabel) (eq (default "" $v.api) "dra"))))
  "ON_UNHEALTHY" $v.onUnhealthy
  "KUBELET_DIR" (ternary $d.kubeletRoot "" (and $d.dra (ne $d.kubeletRoot "/var/lib/kubelet")))
  "DEVICE_LIST_STRATEGY" $d.deviceListStrategy
  "MIG_STRATEGY" $v.migStrategy
  "DEVICE_ID_STRATEGY" $v.deviceIDStrategy
  "DEVICE_DISCOVERY_STRATEGY" $v.deviceDiscoveryStrategy
  "NVIDIA_DEV_ROOT" $v.nvidiaDevRoot
  "NVIDIA_CDI_HOOK_PATH" $v.cdi.nvidiaHookPath
  "CDI_FEATURE_FLAGS" $v.cdi.featureFlags
  "CDI_DISABLE_HOOKS" $v.cdi.disableHooks
  "RESERVATION_CHECK" $v.reservationCheck
  "LOG_LEVEL" $v.logLevel
  "LOG_FORMAT" $v.logFormat
  "NVIDIA_MIG_MONITOR_DEVICES" (ternary "all" "" $d.mig)
  "MPS_ROOT" (ternary $v.mps.root "" $d.mps)
  "CONFIG_FILE" (ternary "/etc/tandem/policy.yaml" "" (and (ne .pool.config "") (not .pool.byLabel)))
  "CONFIG_FILE_SRCDIR" (ternary "/etc/tandem/configs" "" .pool.byLabel)
  "DEFAULT_CONFIG" (ternary .root.Values.config.default "" .pool.byLabel)
  "FALLBACK_STRATEGIES" (ternary (join "," (default list .root.Values.config.fallbackStrategies)) "" .pool.byLabel)
  "PAUSE_LABEL" (ternary .root.Values.gpuOperator.label "" (eq .root.Values.gpuOperator.onDriverUpgrade "quiesce"))
  "OCCUPANCY" (ternary $v.owners.occupancy "" $v.owners.enabled)
  "FEATURES_FILE" (ternary $v.nodeLabels.file "" (eq $d.labels "file"))
  "USE_NODE_FEATURE_API" (ternary "true" "" (eq $d.labels "object"))
  "GFD_NO_TIMESTAMP" (ternary "true" "" (and (ne $d.labels "") $d.noTimestamp))
  "HAND_OVER" (ternary "true" "" $h.enabled)
  "HAND_OVER_CONDITION" (ternary $h.condition "" (and $h.enabled (ne $h.condition "TandemGPUsHealthy")))
  "HAND_OVER_SECOND_CONDITION" (ternary $h.secondCondition "" $h.enabled)
  "HAND_OVER_EVENTS" (ternary "false" "" (and $h.enabled (not $h.events)))
  "KERNEL_LOG" (ternary "" "off" $v.kernelLog)
  "HTTP_ADDRESS" (ternary "" (printf ":%d" (int $v.httpPort)) (eq (int $v.httpPort) 9410))
-}}
{{- $bools := dict
  "PASS_DEVICE_SPECS" $d.passDeviceSpecs
  "FAIL_ON_INIT_ERROR" $v.failOnInitError
  "GDRCOPY_ENABLED" $v.gdrcopyEnabled
  "GDS_ENABLED" $v.gdsEnabled
  "MOFED_ENABLED" $v.mofedEnabled
-}}
{{- range $name, $value := $bools -}}
{{- if kindIs "bool" $value -}}{{- $_ := set $optional $name (toString $value) -}}{{- end -}}
{{- end -}}
{{- range $name := keys $optional | sortAlpha -}}
{{- with index $optional $name -}}{{- $env = append $env (dict "name" $name "value" .) -}}{{- end -}}
{{- end -}}
{{- $env = append $env (dict "name" "NODE_NAME" "valueFrom" (dict "fieldRef" (dict "fieldPath" "spec.nodeName"))) -}}
{{- if eq $d.labels "object" -}}
{{- $env = append $env (dict "name" "NAMESPACE" "valueFrom" (dict "fieldRef" (dict "fieldPath" "metadata.namespace"))) -}}
{{- $env = append $env (dict "name" "POD_NAME" "valueFrom" (dict "fieldRef" (dict "fieldPath" "metadata.name"))) -}}
{{- end -}}
{{- toJson (dict "env" (concat $env (default list $v.extraEnv))) -}}
{{- end -}}

{{- define "tandem.securityContext" -}}
{{- $v := .pool.values -}}
{{- $d := .derived -}}
{{- $add := list -}}
{{- if $d.mig -}}{{- $add = append $add "SYS_ADMIN" -}}{{- end -}}
{{- if $v.kernelLog -}}{{- $add = append $add "SYSLOG" -}}{{- end -}}
{{- $capabilities := dict "drop" (list "ALL") -}}
{{- if $add -}}{{- $_ := set $capabilities "add" $add -}}{{- end -}}
{{- $context := dict "runAsUser" 0 "privileged" $v.cdi.privileged "readOnlyRootFilesystem" true "capabilities" $capabilities -}}
{{- if $d.selinux -}}
{{- $options := dict "type" $v.selinux.type -}}
{{- with $v.selinux.level -}}{{- $_ := set $options "level" . -}}{{- end -}}
{{- $_ := set $context "seLinuxOptions" $options -}}
{{- end -}}
{{- range $key, $value := default dict $v.securityContext -}}
{{- if and (eq $key "capabilities") $value -}}{{/* more of them, and not all that the runtime gives by default */}}
{{- $add := concat (default list $capabilities.add) (default list $value.add) | uniq -}}
{{- $value = merge (dict "add" $add) $value $capabilities -}}
{{- end -}}
{{- $_ := set $context $key $value -}}
{{- end -}}
{{- if not (hasKey $context "allowPrivilegeEscalation") -}}
{{- $_ := set $context "allowPrivilegeEscalation" $context.privileged -}}{{/* false is refused for a privileged container */}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{/* Mounts and volumes, as JSON {"mounts": [...], "volumes": [...]}: see the comments of deploy/daemonset.yaml. */}}
{{- define "tandem.mounts" -}}
{{- $v := .pool.values -}}
{{- $d := .derived -}}
{{- $m := list
  (dict "name" "device-plugins" "mountPath" "/var/lib/kubelet/device-plugins")
  (dict "name" "pod-resources" "mountPath" "/var/lib/kubelet/pod-resources" "readOnly" true "recursiveReadOnly" "IfPossible")
  (dict "name" "state" "mountPath" "/var/lib/tandem")
  (dict "name" "cdi" "mountPath" "/var/run/cdi")
-}}
{{- $h := list
  (list "device-plugins" "/var/lib/kubelet/device-plugins" "Directory")
  (list "pod-resources" (printf "%s/pod-resources" (trimSuffix "/" $v.kubeletRoot)) "DirectoryOrCreate")
  (list "state" $v.stateDir "DirectoryOrCreate")
-}}
{{- $cdi := list "cdi" "/var/run/cdi" "DirectoryOrCreate" -}}
{{- $other := list -}}
{{- if eq $d.driverRoot "/" -}}
{{- $m = append $m (dict "name" "driver-root" "mountPath" "/driver-root/usr" "readOnly" true "mountPropagation" "HostToContainer") -}}
{{- $m = append $m (dict "name" "host-dev" "mountPath" "/driver-root/dev" "readOnly" true "recursiveReadOnly" "IfPossible") -}}
{{- $h = append $h (list "driver-root" "/usr" "Directory") -}}
{{- $h = append $h $cdi -}}
{{- $h = append $h (list "host-dev" "/dev" "Directory") -}}
{{- else -}}
{{- $m = append $m (dict "name" "driver-root" "mountPath" "/driver-root" "readOnly" true "mountPropagation" "HostToContainer") -}}
{{- $type := ternary "DirectoryOrCreate" "Directory" (hasPrefix "/run/" $d.driverRoot) -}}{{/* the driver container may start later */}}
{{- $h = append $h (list "driver-root" $d.driverRoot $type) -}}
{{- $h = append $h $cdi -}}
{{- end -}}
{{- if $d.dra -}}{{/* the kubelet opens the socket at this path: it is that of the host */}}
{{- $registry := printf "%s/plugins_registry" $d.kubeletRoot -}}
{{- $m = append $m (dict "name" "plugins-registry" "mountPath" $registry) -}}
{{- $h = append $h (list "plugins-registry" $registry "Directory") -}}
{{- end -}}
{{- if $d.mps -}}
{{- $m = append $m (dict "name" "mps-root" "mountPath" "/mps" "readOnly" true "recursiveReadOnly" "IfPossible") -}}
{{- $h = append $h (list "mps-root" $v.mps.root "DirectoryOrCreate") -}}
{{- end -}}
{{- if or $v.owners.enabled $d.readsLimits -}}
{{- $m = append $m (dict "name" "pod-logs" "mountPath" "/var/log/pods" "readOnly" true "recursiveReadOnly" "IfPossible") -}}
{{- $h = append $h (list "pod-logs" "/var/log/pods" "Directory") -}}
{{- end -}}
{{- if $d.readsLimits -}}
{{- $m = append $m (dict "name" "cgroup" "mountPath" "/sys/fs/cgroup" "readOnly" true "recursiveReadOnly" "IfPossible") -}}
{{- $h = append $h (list "cgroup" "/sys/fs/cgroup" "Directory") -}}
{{- end -}}
{{- if eq $d.labels "file" -}}
{{- $m = append $m (dict "name" "features" "mountPath" (dir $v.nodeLabels.file)) -}}
{{- $h = append $h (list "features" (dir $v.nodeLabels.file) "DirectoryOrCreate") -}}
{{- end -}}
{{- if .pool.byLabel -}}
{{- $m = append $m (dict "name" "configs" "mountPath" "/etc/tandem/configs" "readOnly" true) -}}
{{- $name := default (printf "%s-configs" (include "tandem.fullname" .root)) .root.Values.config.name -}}
{{- $other = append $other (dict "name" "configs" "configMap" (dict "name" $name)) -}}
{{- else if .pool.config -}}
{{- $m = append $m (dict "name" "policy" "mountPath" "/etc/tandem" "readOnly" true) -}}
{{- $source := dict "name" (printf "%s-config-%s" (include "tandem.fullname" .root) (include "tandem.dnsName" .pool.config)) -}}
{{- if .root.Values.config.name -}}
{{- $source = dict "name" .root.Values.config.name "items" (list (dict "key" .pool.config "path" "policy.yaml")) -}}
{{- end -}}
{{- $other = append $other (dict "name" "policy" "configMap" $source) -}}
{{- end -}}
{{- $volumes := list -}}
{{- range $h -}}
{{- $volumes = append $volumes (dict "name" (index . 0) "hostPath" (dict "path" (index . 1) "type" (index . 2))) -}}
{{- end -}}
{{- $mounts := concat $m (default list $v.extraVolumeMounts) -}}
{{- toJson (dict "mounts" $mounts "volumes" (concat $volumes $other (default list $v.extraVolumes))) -}}
{{- end -}}

{{/* A configuration's name as a part of names of objects. */}}
{{- define "tandem.dnsName" -}}
{{- . | lower | replace "." "-" | replace "_" "-" -}}
{{- end -}}

{{- define "tandem.configText" -}}
{{- $config := index (include "tandem.configMap" .root | fromJson) .name -}}
{{- if kindIs "string" $config -}}{{- $config -}}{{- else -}}{{- toYaml $config -}}{{- end -}}
{{- end -}}
