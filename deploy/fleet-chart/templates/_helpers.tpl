{{- define "fleet.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "fleet.labels" -}}
{{- toYaml (merge (dict "app.kubernetes.io/name" (include "fleet.fullname" .)) (default dict .Values.commonLabels)) -}}
{{- end -}}

{{- define "fleet.image" -}}
{{- $i := .Values.image -}}
{{- if $i.digest -}}
{{- printf "%s@%s" $i.repository $i.digest -}}
{{- else -}}
{{- printf "%s:%s" $i.repository (default .Chart.AppVersion $i.tag) -}}
{{- end -}}
{{- end -}}

{{/* The cluster in which gpu-fleet runs, as JSON: one of config.clusters, or {}. */}}
{{- define "fleet.own" -}}
{{- $own := dict -}}
{{- range .Values.config.clusters -}}
{{- if and (eq .kind "kubernetes") (not .kubeconfig) -}}{{- $own = . -}}{{- end -}}
{{- end -}}
{{- toJson $own -}}
{{- end -}}

{{/* Where ledger and lock are, as JSON. */}}
{{- define "fleet.ledger" -}}
{{- $own := include "fleet.own" . | fromJson -}}
{{- $ledger := default dict .Values.config.ledger -}}
{{- if and $own (eq (default $own.name $ledger.cluster) $own.name) -}}
{{- $ledger = merge (dict) $ledger (dict "cluster" $own.name "namespace" .Release.Namespace "name" (include "fleet.fullname" .)) -}}
{{- end -}}
{{- toJson $ledger -}}
{{- end -}}

{{/* The configuration file. */}}
{{- define "fleet.config" -}}
{{- $c := dict "clusters" .Values.config.clusters "listen" ":9410" "ledger" (include "fleet.ledger" . | fromJson) -}}
{{- with .Values.config.policy -}}{{- $_ := set $c "policy" . -}}{{- end -}}
{{- if .Values.tokenSecret -}}{{- $_ := set $c "token_file" "/etc/gpu-fleet-token/token" -}}{{- end -}}
{{- toYaml $c -}}
{{- end -}}
