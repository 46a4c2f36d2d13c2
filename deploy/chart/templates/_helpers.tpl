{{/* Names as in NVIDIA's chart: the release's name, with the chart's unless it contains that. */}}
{{- define "tandem.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "tandem.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride -}}
{{- end -}}

{{- define "tandem.labels" -}}
{{- $labels := dict "app.kubernetes.io/name" (include "tandem.fullname" .) -}}
{{- toYaml (merge $labels (default dict .Values.commonLabels)) -}}
{{- end -}}

{{/* The name of the account of pods, empty = the namespace's default: {root, token: whether they call the API server}. */}}
{{- define "tandem.serviceAccount" -}}
{{- $s := .root.Values.serviceAccount -}}
{{- if $s.name -}}
{{- $s.name -}}
{{- else if or $s.create .root.Values.openshift.enabled .token -}}
{{- include "tandem.fullname" .root -}}
{{- end -}}
{{- end -}}

{{/* "true" if a pool offers its GPUs by Dynamic Resource Allocation. */}}
{{- define "tandem.dra" -}}
{{- include "tandem.any" (dict "root" . "key" "dra" "value" true) -}}
{{- end -}}

{{/* "true" if something of tandem.derived has a value for a pool: {root, key, value}. */}}
{{- define "tandem.any" -}}
{{- $of := . -}}
{{- $any := false -}}
{{- range $pool := (include "tandem.pools" .root | fromJson).pools -}}
{{- $any = or $any (eq (index (include "tandem.derived" (dict "root" $of.root "pool" $pool) | fromJson) $of.key) $of.value) -}}
{{- end -}}
{{- if $any -}}true{{- end -}}
{{- end -}}

{{- define "tandem.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (default .appVersion .image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Selects the pods of all pools. */}}
{{- define "tandem.podSelector" -}}
{{- $full := include "tandem.fullname" . -}}
{{- $names := list $full -}}
{{- range (include "tandem.pools" . | fromJson).pools -}}
{{- if .name -}}{{- $names = append $names (printf "%s-%s" $full .name) -}}{{- end -}}
{{- end -}}
{{- if eq (len $names) 1 -}}
matchLabels:
  app.kubernetes.io/name: {{ $full | quote }}
{{- else -}}
matchExpressions:
  - {key: app.kubernetes.io/name, operator: In, values: {{ toJson $names }}}
{{- end -}}
{{- end -}}
