{{/*
The name of the DaemonSet of a component, which does for the agents of a node what these have no rights for: of {root, pool, component}.
*/}}
{{- define "tandem.componentName" -}}
{{- $full := include "tandem.fullname" .root -}}
{{- printf "%s-%s" (ternary (printf "%s-%s" $full .pool.name) $full (ne .pool.name "")) .component -}}
{{- end -}}

{{/*
The object: of {root, pool, component}, with the pod's own fields (pod), its container without name and image, and with the seccomp profile of the agent unless the values
have another one (seccomp).
*/}}
{{- define "tandem.component" -}}
{{- $v := .pool.values -}}
{{- $global := .root.Values -}}
{{- $name := include "tandem.componentName" . -}}
{{- $labels := default dict $global.commonLabels -}}
{{- $selector := merge (dict "app.kubernetes.io/name" $name) (default dict $global.selectorLabelsOverride) -}}
{{- $env := .container.env -}}
{{- with $v.logLevel -}}{{- $env = append $env (dict "name" "LOG_LEVEL" "value" .) -}}{{- end -}}
{{- with $v.logFormat -}}{{- $env = append $env (dict "name" "LOG_FORMAT" "value" .) -}}{{- end -}}
{{- $container := merge (dict
  "name" .component "env" $env
  "image" (include "tandem.image" (dict "image" $v.image "appVersion" .root.Chart.AppVersion)) "imagePullPolicy" $v.image.pullPolicy
) .container -}}
{{- $pod := merge (dict "containers" (list $container) "automountServiceAccountToken" false "enableServiceLinks" false) .pod -}}
{{- with $v.priorityClassName -}}{{- $_ := set $pod "priorityClassName" . -}}{{- end -}}
{{- with $v.tolerations -}}{{- $_ := set $pod "tolerations" . -}}{{- end -}}
{{- with merge (dict) .pool.nodeSelector (default dict $v.nodeSelector) -}}{{- $_ := set $pod "nodeSelector" . -}}{{- end -}}
{{- with include "tandem.affinity" . -}}{{- $_ := set $pod "affinity" (fromYaml .) -}}{{- end -}}
{{- with include "tandem.serviceAccount" . -}}{{- $_ := set $pod "serviceAccountName" . -}}{{- end -}}
{{- with $global.imagePullSecrets -}}{{- $_ := set $pod "imagePullSecrets" . -}}{{- end -}}
{{- with merge (dict) (default dict $v.podSecurityContext) (ternary (dict "seccompProfile" (dict "type" "RuntimeDefault")) dict .seccomp) -}}
{{- $_ := set $pod "securityContext" . -}}
{{- end -}}
{{- $meta := dict "labels" (merge (dict) $selector $labels (default dict $v.podLabels)) -}}
{{- with $v.podAnnotations -}}{{- $_ := set $meta "annotations" . -}}{{- end -}}
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: {{ $name | quote }}
  namespace: {{ include "tandem.namespace" .root | quote }}
  labels:
    {{- toYaml (merge (dict "app.kubernetes.io/name" $name) $labels) | nindent 4 }}
spec:
  selector:
    matchLabels:
      {{- toYaml $selector | nindent 6 }}
  updateStrategy:
    type: RollingUpdate
    rollingUpdate:
      maxUnavailable: 1
      maxSurge: 0
  template:
    metadata:
      {{- toYaml $meta | nindent 6 }}
    spec:
      {{- toYaml $pod | nindent 6 }}
{{- end -}}
