package kubeapi

import "context"

// DeviceClass is the part of resource.k8s.io/v1 DeviceClass that a check reads.
type DeviceClass struct {
	Metadata ObjectMeta      `json:"metadata"`
	Spec     DeviceClassSpec `json:"spec"`
}

// DeviceClassSpec is the part of DeviceClassSpec that a check reads.
type DeviceClassSpec struct {
	ExtendedResourceName string `json:"extendedResourceName,omitempty"` // that pods may request in place of a claim; "" = none
}

// Classes returns all DeviceClasses. Only doctor needs it.
func (c *Client) Classes(ctx context.Context) ([]DeviceClass, error) {
	list, err := answerOf[struct {
		Items []DeviceClass `json:"items"`
	}](ctx, c, call{verb: "list", object: object{resourceGroup, "deviceclasses", "", ""}})
	return list.Items, err
}
