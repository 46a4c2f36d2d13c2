package kube

import (
	"context"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/tandem-gpu/tandem/internal/rescue"
)

// Do evicts the pod of an act. It reads the pod first: an eviction with the UID of a pod that has gone uses up a slot of the disruption budget of the pod
// that has its name now, or waits for that budget.
func (c *Cluster) Do(ctx context.Context, a rescue.Act) rescue.Answer {
	ctx, cancel := deadline(ctx)
	defer cancel()
	if a.Device != "" || len(a.Work) != 1 || a.Listed {
		return rescue.Answer{Kind: rescue.Denied, Text: "only one pod at a time is evicted"}
	}
	work := a.Work[0]
	pod, err := c.client.CoreV1().Pods(work.Namespace).Get(ctx, work.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return rescue.Answer{Kind: rescue.NotFound, Text: "the pod has gone"}
	case err != nil:
		c.noteMissing(getPods, err)
		return rescue.Answer{Kind: rescue.NotMade, Text: "the pod can't be read: " + err.Error()}
	case string(pod.UID) != work.ID:
		return rescue.Answer{Kind: rescue.NotFound, Text: "the pod has gone, and another one has its name"}
	case pod.DeletionTimestamp != nil:
		return rescue.Answer{Kind: rescue.Accepted, Text: "the pod was deleted already, and ends"}
	case pod.Spec.NodeName != a.Node:
		return rescue.Answer{Kind: rescue.NotFound, Text: "the pod is on node " + pod.Spec.NodeName}
	}
	if err := ctx.Err(); err != nil {
		return rescue.Answer{Kind: rescue.NotMade, Text: err.Error()}
	}
	return c.answer(ctx, pod, c.evict(ctx, pod))
}

// evict makes the call once: client-go would repeat one that is answered with Retry-After, for up to 100 s.
func (c *Cluster) evict(ctx context.Context, pod *corev1.Pod) error {
	return c.client.CoreV1().RESTClient().Post().
		Namespace(pod.Namespace).Resource("pods").Name(pod.Name).SubResource("eviction").
		VersionedParams(&metav1.CreateOptions{}, scheme.ParameterCodec).
		Body(&policyv1.Eviction{
			ObjectMeta:    metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name},
			DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &pod.UID}},
		}).MaxRetries(0).Do(ctx).Error()
}

// answer is what the server's answer to an eviction means.
func (c *Cluster) answer(ctx context.Context, pod *corev1.Pod, err error) rescue.Answer {
	switch {
	case err == nil:
		return rescue.Answer{Kind: rescue.Accepted}
	case apierrors.IsNotFound(err):
		return rescue.Answer{Kind: rescue.NotFound, Text: err.Error()}
	case apierrors.IsConflict(err) && strings.Contains(err.Error(), "UID"):
		return rescue.Answer{Kind: rescue.NotFound, Text: err.Error()}
	case apierrors.IsTooManyRequests(err):
		return c.blocked(ctx, pod, err)
	case strings.Contains(err.Error(), "more than one PodDisruptionBudget"):
		return rescue.Answer{Kind: rescue.Denied, Text: err.Error()}
	}
	c.noteMissing(eviction, err)
	return rescue.Answer{Kind: rescue.Failed, Text: err.Error()}
}

// noteMissing records that a right is missing, if an error shows that.
func (c *Cluster) noteMissing(needs right, err error) {
	if apierrors.IsForbidden(err) && strings.Contains(err.Error(), "cannot "+needs.verb+" resource") {
		c.setMissing(needs, fmt.Sprintf("the right to %s is missing. %v", needs, err))
	}
}

// blocked is an answer of a disruption budget, or of a server that is busy.
func (c *Cluster) blocked(ctx context.Context, pod *corev1.Pod, err error) rescue.Answer {
	answer := rescue.Answer{Kind: rescue.Blocked, Text: err.Error()}
	if s, ok := apierrors.SuggestsClientDelay(err); ok {
		answer.After = time.Duration(s) * time.Second
	}
	if !apierrors.HasStatusCause(err, policyv1.DisruptionBudgetCause) {
		return answer
	}
	budgets, err := c.client.PolicyV1().PodDisruptionBudgets(pod.Namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return answer // only its remedy is not known
	}
	for i := range budgets.Items {
		if b := &budgets.Items[i]; covers(b, pod) {
			answer.Remedy = remedy(b, pod)
		}
	}
	return answer
}

func covers(b *policyv1.PodDisruptionBudget, pod *corev1.Pod) bool {
	s, err := metav1.LabelSelectorAsSelector(b.Spec.Selector)
	return err == nil && s.Matches(labels.Set(pod.Labels))
}

// remedy is what has to be changed if a disruption budget will not let a pod go by itself.
func remedy(b *policyv1.PodDisruptionBudget, pod *corev1.Pod) string {
	always := b.Spec.UnhealthyPodEvictionPolicy != nil && *b.Spec.UnhealthyPodEvictionPolicy == policyv1.AlwaysAllow
	switch {
	case !ready(pod) && !always:
		return "set spec.unhealthyPodEvictionPolicy: AlwaysAllow of PodDisruptionBudget " + b.Name
	case b.Status.ExpectedPods > 0 && b.Status.DesiredHealthy >= b.Status.ExpectedPods:
		return "let PodDisruptionBudget " + b.Name + " allow one disruption, or add a replica"
	}
	return ""
}

func ready(pod *corev1.Pod) bool {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}
