{{/*
Other DaemonSets that offer NVIDIA's GPUs, as JSON {"plugins": ["DaemonSet x in namespace y"], "drivers": [...]}: device plugins, agents of this
kind among them, and NVIDIA's DRA driver. Empty without a cluster (helm template), or with lookups: false.
*/}}
{{- define "tandem.others" -}}
{{- $plugins := list -}}
{{- $drivers := list -}}
{{- if .Values.lookups -}}
{{- range (lookup "apps/v1" "DaemonSet" "" "").items -}}
{{- $at := printf "DaemonSet %s in namespace %s" .metadata.name .metadata.namespace -}}
{{- $by := default dict .metadata.annotations -}}
{{- $own := and (eq (default "" (index $by "meta.helm.sh/release-name")) $.Release.Name) (eq (default "" (index $by "meta.helm.sh/release-namespace")) $.Release.Namespace) -}}
{{- range .spec.template.spec.containers -}}
{{- /* The image of NVIDIA's plugin also has gpu-feature-discovery and the MPS daemon, which may stay. */ -}}
{{- if or (and (eq .name "k8s-gpu") (not $own)) (eq .name "nvidia-device-plugin-ctr") (and (regexMatch "(k8s|nvidia-gpu)-device-plugin(:|@|$)" .image) (not (regexMatch "mps|feature-discovery|config-manager" .name))) -}}
{{- $plugins = append $plugins $at -}}
{{- end -}}
{{- /* The container compute-domains, of another driver's name, may stay. */ -}}
{{- if and (eq .name "gpus") (regexMatch "dra-driver" .image) -}}{{- $drivers = append $drivers $at -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson (dict "plugins" (uniq $plugins) "drivers" (uniq $drivers)) -}}
{{- end -}}

{{/*
What is left of another DRA driver, or disagrees with the classes of this release, as JSON {"warnings": [...]}. Slices of the agents have the
names NODE-gpu.nvidia.com-NUMBER.
*/}}
{{- define "tandem.leftovers" -}}
{{- $warnings := list -}}
{{- $resource := .Values.deviceClasses.extendedResourceName -}}
{{- range (lookup "resource.k8s.io/v1" "DeviceClass" "" "").items -}}
{{- if and $resource (eq (default "" .spec.extendedResourceName) $resource) (ne .metadata.name "gpu.nvidia.com") -}}
{{- $warnings = append $warnings (printf "DeviceClass %s has the extended resource %s, too: the newer class applies. Remove it, or the name from it." .metadata.name $resource) -}}
{{- end -}}
{{- end -}}
{{- $nodes := list -}}
{{- range (lookup "resource.k8s.io/v1" "ResourceSlice" "" "").items -}}
{{- $node := default "" .spec.nodeName -}}
{{- if and (eq .spec.driver "gpu.nvidia.com") (not (hasPrefix (printf "%s-gpu.nvidia.com-" $node) .metadata.name)) -}}
{{- $nodes = append $nodes $node -}}
{{- end -}}
{{- end -}}
{{- with uniq $nodes | sortAlpha -}}
{{- $warnings = append $warnings (printf "%d nodes have ResourceSlices of another driver gpu.nvidia.com (%s). Drain such a node before its agent takes over: pods may use GPUs under the other driver's names (docs/dra.md)." (len .) (join ", " (slice . 0 (min 5 (len .))))) -}}
{{- end -}}
{{- toJson (dict "warnings" $warnings) -}}
{{- end -}}
