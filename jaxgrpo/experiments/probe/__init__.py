"""`jaxgrpo probe`: do groups of samples carry signal?"""
