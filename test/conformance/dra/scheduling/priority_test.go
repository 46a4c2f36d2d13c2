//go:build !before1.37

package scheduling

import (
	"errors"
	"os"
	"strings"
	"testing"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/apis/flowcontrol"
	_ "k8s.io/kubernetes/pkg/apis/flowcontrol/install" // its types in legacyscheme
	"k8s.io/kubernetes/pkg/apis/flowcontrol/validation"
	"sigs.k8s.io/yaml"
)

// The API server accepts the priority level of the agents and its schema.
func TestPriorityLevel(t *testing.T) {
	text, err := os.ReadFile("../../../../deploy/dra/priority.yaml")
	if err != nil {
		t.Fatal(err)
	}
	documents := strings.Split(string(text), "\n---\n")
	var level flowcontrolv1.PriorityLevelConfiguration
	var flow flowcontrolv1.FlowSchema
	if err := errors.Join(yaml.UnmarshalStrict([]byte(documents[0]), &level), yaml.UnmarshalStrict([]byte(documents[1]), &flow)); err != nil {
		t.Fatal(err)
	}
	legacyscheme.Scheme.Default(&level)
	legacyscheme.Scheme.Default(&flow)
	var internalLevel flowcontrol.PriorityLevelConfiguration
	var internalFlow flowcontrol.FlowSchema
	if err := errors.Join(legacyscheme.Scheme.Convert(&level, &internalLevel, nil), legacyscheme.Scheme.Convert(&flow, &internalFlow, nil)); err != nil {
		t.Fatal(err)
	}
	problems := append(validation.ValidatePriorityLevelConfiguration(&internalLevel, flowcontrolv1.SchemeGroupVersion, validation.PriorityLevelValidationOptions{}), validation.ValidateFlowSchema(&internalFlow)...)
	if len(problems) > 0 || flow.Spec.PriorityLevelConfiguration.Name != level.Name {
		t.Error(problems, flow.Spec.PriorityLevelConfiguration.Name)
	}
}
